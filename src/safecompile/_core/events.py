"""What is compiled, told to whoever subscribes. Warm calls do not come here."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any, TypeVar

from safecompile._core.forks import lock_across_forks

__all__ = ["RESUME", "Compile", "current", "explain", "subscribe", "unsubscribe", "watched"]

_R = TypeVar("_R")

RESUME = "torch_dynamo_resume_in_"
"""How the names begin that Dynamo gives to what follows a graph break."""


@dataclass(frozen=True)
class Compile:
    """One compile: an entry in Dynamo's cache, a backward, or a graph that was given to a compiler directly."""

    kind: str
    """``forward``; ``resume function``, for what follows a graph break; ``backward``, of one that is compiled when it
    is first used; or ``graph``, for one given to AOTAutograd or Inductor without Dynamo."""
    function: str
    filename: str
    line: int
    thread: str = ""
    """Name of the thread that compiled."""
    reasons: tuple[str, ...] = ()
    """Why there was no entry to use, that of the nearest entry first, e.g. ``argument x: size mismatch at index 0:
    expected 3, actual 4``."""
    seconds: float = 0.0
    error: str | None = None
    """What the compile failed with."""

    @classmethod
    def of(cls, code: CodeType) -> Compile:
        """Return what a conversion of ``code`` by Dynamo compiles."""
        if not code.co_name.startswith(RESUME):
            # With the class of a method: all modules have a forward.
            name = getattr(code, "co_qualname", code.co_name).rpartition("<locals>.")[2]  # from Python 3.11 on
            return cls("forward", name, code.co_filename, code.co_firstlineno)
        name, _, line = code.co_name[len(RESUME) :].rpartition("_at_")
        line = re.match(r"\d*", line)[0]  # type: ignore[index]
        return cls("resume function", name, code.co_filename, int(line or code.co_firstlineno))


def _unexplained(entries: list[Any], frame: Any) -> tuple[str, ...]:
    return ()


explain: Callable[[list[Any], Any], tuple[str, ...]] = _unexplained
"""Tells why a frame is compiled, from the entries of Dynamo's cache that do not fit it. Set by a tool that subscribes."""


# Replaced, never changed, so that a compile reads it without a lock.
_subscribers: tuple[Callable[[Compile], None], ...] = ()
_changing = lock_across_forks()

# Guarded by the compile lock.
_current: Compile | None = None


def subscribe(subscriber: Callable[[Compile], None]) -> None:
    """Call ``subscriber`` after each compile that begins from now on, in the thread that has compiled.

    That thread has the compile lock: the subscriber must be quick, must not wait for a thread, and must not raise.
    """
    global _subscribers  # noqa: PLW0603  of the process, as the compiles are
    with _changing:
        _subscribers = (*_subscribers, subscriber)


def unsubscribe(subscriber: Callable[[Compile], None]) -> None:
    """Do not tell ``subscriber`` of compiles that begin from now on."""
    global _subscribers  # noqa: PLW0603
    with _changing:
        _subscribers = tuple(one for one in _subscribers if one is not subscriber)


def current() -> Compile | None:
    """Return what is being compiled. Call with the compile lock held."""
    return _current


def watched(
    compile_: Compile,
    work: Callable[[], _R],
    *,
    reasons: Callable[[], tuple[str, ...]],
    made: Callable[[_R], Any] = lambda _: True,
) -> _R:
    """Do the work of a compile, and tell those who had subscribed when it began. Call with the compile lock held.

    Args:
        compile_: what is compiled; the rest is filled in.
        work: compiles.
        reasons: works out the reasons, before the work; called only if somebody has subscribed.
        made: tells from what the work has returned whether it was a compile at all.
    """
    global _current  # noqa: PLW0603
    told, before, _current = _subscribers, _current, compile_
    try:
        if not told:
            return work()
        compile_ = replace(compile_, thread=threading.current_thread().name, reasons=reasons())
        start = time.perf_counter()

        def tell(error: str | None = None) -> None:
            ended = replace(compile_, seconds=time.perf_counter() - start, error=error)
            for subscriber in told:
                subscriber(ended)

        try:
            result = work()
        except BaseException as error:
            tell(" ".join(f"{type(error).__name__}: {error}".splitlines()[:2]))
            raise
        if made(result):
            tell()
        return result
    finally:
        _current = before
