"""``checkpoint``: activation checkpointing that threads can use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from safecompile._core.errors import CheckpointRandomnessError, UnsupportedCallableError
from safecompile._patches.random_numbers import (
    Recording,
    Replay,
    Watch,
    generator_states,
    recompute_to_the_end,
    same_states,
    tensors_in,
)

__all__ = ["checkpoint"]

_R = TypeVar("_R")


def checkpoint(function: Callable[..., _R], *args: Any, **options: Any) -> _R:
    """Run ``function`` without keeping its activations; compute them again in the backward.

    As ``torch.utils.checkpoint.checkpoint`` with ``use_reentrant=False``, always: the reentrant kind runs the
    forward without grad, so a compiled callable inside is compiled a second time, during backward.

    The recomputation sees its forward's random numbers. The generators belong to the process, and another thread
    may draw at any time; so where there are other threads, what random operators give in the forward is kept
    (the masks of dropout, for example) and put in again, and no generator is set back under other threads' feet. A
    process with one thread does as torch does.

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
    if threading.active_count() > 1:
        options["preserve_rng_state"] = False
        return torch_checkpoint(_Recorded(function), *args, use_reentrant=False, **options)  # type: ignore[no-any-return]
    return torch_checkpoint(_Compared(function), *args, use_reentrant=False, **options)  # type: ignore[no-any-return]


class _Recorded:
    """The function of one checkpoint among threads: called in the forward, then in each recomputation."""

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


class _Compared:
    """The function of a checkpoint in a process with one thread; others may have started by the backward."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._ran = False
        # The generators' states after the forward, if it drew anything.
        self._after: list[torch.Tensor] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        devices = sorted({t.get_device() for t in tensors_in((args, kwargs)) if t.is_cuda})
        if not self._ran:
            before = generator_states(devices)
            result = self._function(*args, **kwargs)
            after = generator_states(devices)
            if not same_states(before, after):
                self._after = after
                recompute_to_the_end()
            self._ran = True
            return result
        if self._after is None:
            return self._function(*args, **kwargs)
        if threading.active_count() == 1:
            before = generator_states(devices)
            result = self._function(*args, **kwargs)
            # A Watch would cost some microseconds an operator. Nothing is drawn where selective checkpointing kept it.
            drew = not same_states(before, generator_states(devices))
        else:
            with Watch() as watch:
                result = self._function(*args, **kwargs)
            drew = watch.drew
        if drew and not same_states(self._after, generator_states(devices)):
            raise CheckpointRandomnessError(
                f"the recomputation of checkpoint({getattr(self._function, '__qualname__', type(self._function))}) saw "
                "other random numbers than its forward, and the gradients would be wrong: another thread, which was "
                "not there when the forward began, drew meanwhile. Start the threads before the forward, or let them not "
                "draw. If there is none, the region itself does not draw the same in both."
            )
        return result
