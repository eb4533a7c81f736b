"""``checkpoint``: activation checkpointing that threads can use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from safecompile._core.errors import CheckpointRandomnessError, UnsupportedCallableError
from safecompile._patches.checkpoint import draws_random_numbers, recompute_to_the_end, tensors_in

__all__ = ["checkpoint"]

_R = TypeVar("_R")


def checkpoint(function: Callable[..., _R], *args: Any, **options: Any) -> _R:
    """Run ``function`` without keeping its activations; compute them again in the backward.

    As ``torch.utils.checkpoint.checkpoint`` with ``use_reentrant=False``, always: the reentrant kind runs the
    forward without grad, so a compiled callable inside is compiled a second time, during backward.

    The recomputation must see its forward's random numbers. They come from generators that all threads of the
    process share, so that another thread which draws in between spoils them; that is noticed and raised.

    Args:
        function: the region; called again in the backward.
        *args: its arguments.
        **options: the options of ``torch.utils.checkpoint.checkpoint`` (``context_fn``, ``determinism_check``,
            ``debug``, ``early_stop``, ``preserve_rng_state``); everything else is passed to ``function``.

    Raises:
        UnsupportedCallableError: ``function`` is not callable.
        ValueError: ``use_reentrant=True``.
        CheckpointRandomnessError: in the backward, if the recomputation saw other random numbers.
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
    return torch_checkpoint(_Region(function), *args, use_reentrant=False, **options)  # type: ignore[no-any-return]


class _Region:
    """The function of one checkpoint: called once in the forward, then once in each recomputation."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._ran = False
        # The generators' states after the forward, if anything was drawn while it ran.
        self._after: list[torch.Tensor] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        devices = sorted({t.get_device() for t in tensors_in((args, kwargs)) if t.is_cuda})
        if not self._ran:
            before = _generator_states(devices)
            result = self._function(*args, **kwargs)
            after = _generator_states(devices)
            if not _equal(before, after) and recompute_to_the_end():
                self._after = after
            self._ran = True
            return result
        result = self._function(*args, **kwargs)
        if (
            self._after is not None
            and not _equal(self._after, _generator_states(devices))
            and draws_random_numbers(self._function, args, kwargs)
        ):
            raise CheckpointRandomnessError(
                f"the recomputation of checkpoint({getattr(self._function, '__qualname__', self._function)}) saw other "
                "random numbers than its forward: another thread drew from the process's generator meanwhile, and "
                "the gradients would be wrong. Draw the numbers outside the region and pass them in, or let no "
                "other thread draw during forward and backward."
            )
        return result


def _generator_states(devices: list[int]) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


def _equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))
