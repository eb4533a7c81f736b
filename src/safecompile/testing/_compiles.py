"""A limit on how much is compiled."""

from __future__ import annotations

import functools
import inspect
from types import TracebackType
from typing import Any, TypeVar, cast

from safecompile._core.errors import SafeCompileError, UnsupportedCallableError
from safecompile._core.events import Compile, subscribe, unsubscribe
from safecompile._installation import install

__all__ = ["CompileLimitError", "MaxCompiles", "max_compiles", "no_compiles"]

_F = TypeVar("_F")


class CompileLimitError(SafeCompileError, AssertionError):
    """More was compiled than a test allows."""

    compiles: tuple[Compile, ...] = ()
    """All of them, and those that failed, in the order in which they ended."""


def max_compiles(n: int) -> MaxCompiles:
    """Allow at most ``n`` compiles in a ``with`` block or, as a decorator, in each call of a function.

    Counted are the compiles that begin in the block and end in it, in any thread of the process, of guarded and of
    plain ``torch.compile`` callables: each entry in Dynamo's cache (the parts of a graph-broken function count each),
    each backward that is compiled when it is first used (one that torch compiles with its forward is part of that),
    and each graph that is given to AOTAutograd or Inductor directly. A frame that turns out to be skipped, or is
    inlined, is no compile. One that fails is listed, but not counted. Let threads end inside the block.

    The block installs the patches. It gives the ``MaxCompiles``, whose ``compiles`` can be looked at.

    Args:
        n: how many are allowed, 0 or more.

    Raises:
        CompileLimitError: at the end of the block, in the thread that it belongs to, if there were more. It lists each
            compile with its function, thread and reason. An exception of the block itself wins.
        TypeError: ``n`` is not an int.
        ValueError: ``n`` is negative.
        PatchesInUseError: the block begins inside a trace or compile that began without the patches.
        UnsupportedCallableError: what is decorated is a class, or a coroutine or generator function.
    """
    given: object = n
    if not isinstance(given, int) or isinstance(given, bool):
        raise TypeError(f"max_compiles takes the number of compiles that are allowed, e.g. max_compiles(1), not {n!r}.")
    if n < 0:
        raise ValueError(f"max_compiles takes 0 or more compiles, not {n}.")
    return MaxCompiles(n)


def no_compiles() -> MaxCompiles:
    """Allow no compile: ``max_compiles(0)``, for what must be warm. Errors are the same."""
    return max_compiles(0)


class MaxCompiles:
    """A limit on how much is compiled: a context manager and a decorator. Made by ``max_compiles``."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._entered = False
        self._ended: list[Compile] = []

    @property
    def compiles(self) -> tuple[Compile, ...]:
        """The compiles that have ended so far, without those that failed."""
        return tuple(one for one in list(self._ended) if one.error is None)

    def __enter__(self) -> MaxCompiles:  # noqa: PYI034  Self is newer than Python 3.10
        if self._entered:
            raise RuntimeError("this limit is in use, and counts for one block at a time: call max_compiles again.")
        install()
        self._entered, self._ended = True, []
        # A list of each block's own: one that a compile began in and outlives is not the next block's.
        self._subscriber = self._ended.append
        subscribe(self._subscriber, Compile)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        unsubscribe(self._subscriber)
        self._entered = False
        if kind is None and len(self.compiles) > self._n:
            ended = tuple(self._ended)
            error = CompileLimitError(_text(self._n, ended))
            error.compiles = ended
            raise error

    def __call__(self, function: _F) -> _F:
        """Decorate a function, also a method: each call is a block of its own."""
        return cast("_F", _decorate(self._n, function))


def _decorate(n: int, function: Any) -> Any:
    if isinstance(function, (classmethod, staticmethod)):
        return type(function)(_decorate(n, function.__func__))
    if problem := _problem_with(function):
        name = getattr(function, "__qualname__", None) or type(function).__qualname__
        raise UnsupportedCallableError(f"max_compiles cannot decorate {name}: it {problem}.")

    @functools.wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        with MaxCompiles(n):
            return function(*args, **kwargs)

    return limited


def _problem_with(function: Any) -> str | None:
    if isinstance(function, type):
        return "is a class; decorate its methods"
    if not callable(function):
        return "is not callable; give a function or a method"
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return "is a coroutine function, which has not run when it returns; use `with max_compiles(n):` inside it"
    if inspect.isgeneratorfunction(function):
        return "is a generator function, which has not run when it returns; use `with max_compiles(n):` inside it"
    return None


def _text(n: int, ended: tuple[Compile, ...]) -> str:
    made = [one for one in ended if one.error is None]
    failed = [one for one in ended if one.error is not None]
    lines = [f"at most {n} compile{'' if n == 1 else 's'} allowed, and there were {len(made)}:"]
    lines += [f"  {number}. {_line(one)}" for number, one in enumerate(made, 1)]
    if failed:
        lines.append("Not counted, for they failed:")
        lines += [f"  - {_line(one)}; {one.error}" for one in failed]
    lines.append(
        "Warm up before the block (safecompile.warmup), let what changes be dynamic or the same for all calls and "
        "threads, or allow more."
    )
    return "\n".join(lines)


def _line(one: Compile) -> str:
    reason = one.reasons[0] if one.reasons else "another graph is needed"
    return f"{one.kind} of {one.function} ({one.filename}:{one.line}) in thread {one.thread!r}: {reason}"
