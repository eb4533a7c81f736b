"""``checkpoint``: activation checkpointing that threads can use."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from safecompile._core.errors import UnsupportedCallableError
from safecompile._patches.regions import Region

__all__ = ["checkpoint", "checkpoint_sequential"]

_R = TypeVar("_R")
_F = TypeVar("_F", bound=Callable[..., Any])


@overload
def checkpoint(function: None = None, /, **options: Any) -> Callable[[_F], _F]: ...
@overload
def checkpoint(function: Callable[..., _R], /, *args: Any, **options: Any) -> _R: ...
def checkpoint(function: Any = None, /, *args: Any, **options: Any) -> Any:
    """Run ``function`` without keeping its activations; compute them again in the backward.

    As ``torch.utils.checkpoint.checkpoint`` with ``use_reentrant=False``, always: the reentrant kind runs the
    forward without grad, so a compiled callable inside is compiled a second time, during backward.

    The recomputation sees its forward's random numbers. The generators belong to the process, and another thread
    may draw at any time; so among threads what random operators give in the forward is kept (the masks of dropout,
    for example) and put in again, and no generator is set back under other threads' feet. The forward draws what it
    would draw without a checkpoint. The recomputation also runs with its forward's intra-op threads, for which compiled
    callables inside are compiled, and in a copy of its forward's context: it sees the same ``contextvars``, and from
    torch 2.12 on the same compiler configuration.

    As a decorator, ``@checkpoint``, ``@checkpoint()`` or ``@checkpoint(determinism_check="none")``, it makes each call
    of the decorated function a region.

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
    if options.pop("use_reentrant", False):
        raise ValueError(
            "checkpoint(use_reentrant=True) is refused: its forward runs without grad and its recomputation with, so "
            "a compiled callable inside is compiled twice, the second time in backward, where on CUDA another "
            "thread compiles. Leave use_reentrant out."
        )
    function = options.pop("function", function)
    if function is None and not args:
        return functools.partial(_decorate, options)
    if not args and inspect.isfunction(function) and _needs_arguments(function, options):
        return _decorate(options, function)
    if not callable(function):
        raise UnsupportedCallableError(f"checkpoint cannot call {type(function).__name__}: give a function or module.")
    if torch.compiler.is_compiling():
        return torch_checkpoint(function, *args, use_reentrant=False, **options)
    region = Region(function, random=options.pop("preserve_rng_state", True))
    return torch_checkpoint(region, *args, use_reentrant=False, preserve_rng_state=False, **options)


def _needs_arguments(function: Callable[..., Any], options: dict[str, Any]) -> bool:
    own = inspect.signature(torch_checkpoint).parameters
    try:
        inspect.signature(function).bind(**{name: value for name, value in options.items() if name not in own})
    except TypeError:
        return True
    return False


def _decorate(options: dict[str, Any], function: _F) -> _F:
    if not inspect.isroutine(function):
        raise UnsupportedCallableError(
            f"checkpoint() decorates functions and methods, not {type(function).__name__}: call checkpoint(module, x)."
        )

    @functools.wraps(function)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(function, *args, **options, **kwargs)

    return checkpointed  # type: ignore[return-value]


def checkpoint_sequential(
    functions: torch.nn.Sequential | Iterable[Callable[..., Any]],
    segments: int,
    input: Any,  # noqa: A002  torch's name
    **options: Any,
) -> Any:
    """Run functions one after the other, in ``segments`` checkpointed regions of equally many; the last is none.

    As ``torch.utils.checkpoint.checkpoint_sequential``.

    Args:
        functions: an ``nn.Sequential``, or callables of one argument.
        segments: how many regions to make.
        input: the argument of the first function.
        **options: the options of ``checkpoint``.

    Raises:
        ValueError: ``segments`` is not between 1 and the number of functions, or ``use_reentrant=True``.
    """
    functions = list(functions)
    if not 1 <= segments <= len(functions):
        raise ValueError(f"segments must be between 1 and {len(functions)}, the number of functions, not {segments}.")

    size = len(functions) // segments
    value = input
    for start in range(0, size * (segments - 1), size):
        value = checkpoint(_run, *functions[start : start + size], value, **options)
    return _run(*functions[size * (segments - 1) :], value)


def _run(*functions_and_value: Any) -> Any:
    *functions, value = functions_and_value
    for function in functions:
        value = function(value)
    return value
