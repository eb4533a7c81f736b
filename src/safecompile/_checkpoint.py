"""``checkpoint``: activation checkpointing that threads can use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from safecompile._core.errors import UnsupportedCallableError
from safecompile._patches.random_numbers import Recording, Replay, recompute_to_the_end

__all__ = ["checkpoint"]

_R = TypeVar("_R")


def checkpoint(function: Callable[..., _R], *args: Any, **options: Any) -> _R:
    """Run ``function`` without keeping its activations; compute them again in the backward.

    As ``torch.utils.checkpoint.checkpoint`` with ``use_reentrant=False``, always: the reentrant kind runs the
    forward without grad, so a compiled callable inside is compiled a second time, during backward.

    The recomputation sees its forward's random numbers. The generators belong to the process, and another thread
    may draw at any time; so what random operators give in the forward is kept (the masks of dropout, for example) and
    put in again, and no generator is set back under other threads' feet. The forward draws what it would draw
    without a checkpoint.

    Args:
        function: the region; called again in the backward.
        *args: its arguments.
        **options: the options of ``torch.utils.checkpoint.checkpoint`` (``context_fn``, ``determinism_check``,
            ``debug``, ``early_stop``, ``preserve_rng_state``); everything else is passed to ``function``.

    Raises:
        UnsupportedCallableError: ``function`` is not callable.
        ValueError: ``use_reentrant=True``.
        CheckpointRandomnessError: in the backward, if the recomputation would see other random numbers.
    """
    if not callable(function):
        raise UnsupportedCallableError(f"checkpoint cannot call {type(function).__name__}: give a function or module.")
    if options.pop("use_reentrant", False):
        raise ValueError(
            "checkpoint(use_reentrant=True) is refused: its forward runs without grad and its recomputation with, so "
            "a compiled callable inside is compiled twice, the second time in backward, where on CUDA another "
            "thread compiles. Leave use_reentrant out."
        )
    if torch.compiler.is_compiling() or not options.get("preserve_rng_state", True):
        return torch_checkpoint(function, *args, use_reentrant=False, **options)  # type: ignore[no-any-return]
    options["preserve_rng_state"] = False
    return torch_checkpoint(_Region(function), *args, use_reentrant=False, **options)  # type: ignore[no-any-return]


class _Region:
    """The function of one checkpoint: called in the forward, then in each recomputation."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._tape: list[Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._tape is not None:
            with Replay(self._tape):
                return self._function(*args, **kwargs)
        tape: list[Any] = []
        with Recording(tape) as recording:
            result = self._function(*args, **kwargs)
        if recording.to_the_end:
            recompute_to_the_end()
        self._tape = tape
        return result
