"""What happens around compiles, told to whoever subscribes. Warm calls come here only while somebody asks for calls."""

from __future__ import annotations

import contextvars
import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any, TypeVar

from safecompile._core.forks import lock_across_forks
from safecompile._core.guarded import Guarded

log = logging.getLogger("safecompile")

_R = TypeVar("_R")

clock = time.perf_counter
"""Of all times in events, in seconds."""

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
    ident: int = 0
    """Ident of the thread."""
    start: float = 0.0
    """When it began, as ``time.perf_counter()`` says it."""
    guarded: Guarded | None = field(default=None, repr=False, compare=False)
    """The guarded callable whose call compiled, if it was one."""

    @classmethod
    def of(cls, code: CodeType, guarded: Guarded | None = None) -> Compile:
        """Return what a conversion of ``code`` by Dynamo compiles."""
        kind, (name, filename, line) = "forward", described(code)
        if code.co_name.startswith(RESUME):
            kind = "resume function"
        return cls(kind, name, filename, line, guarded=guarded)


def described(code: CodeType) -> tuple[str, str, int]:
    """Return name, file and line of the user's function that ``code`` is of, or is the rest of."""
    if not code.co_name.startswith(RESUME):
        # With the class of a method: all modules have a forward.
        name = getattr(code, "co_qualname", code.co_name).rpartition("<locals>.")[2]  # from Python 3.11 on
        return name, code.co_filename, code.co_firstlineno
    name, _, line = code.co_name[len(RESUME) :].rpartition("_at_")
    line = re.match(r"\d*", line)[0]  # type: ignore[index]
    return name, code.co_filename, int(line or code.co_firstlineno)


@dataclass(frozen=True)
class Wait:
    """A wait for the FX-trace lock that has ended."""

    thread: str
    ident: int
    start: float
    seconds: float
    holder: str | None
    """Name of the thread that had the lock when the wait began."""
    doing: str | None
    """What that thread did with it, e.g. ``compiling forward (model.py:12)``."""


@dataclass(frozen=True)
class EagerRun:
    """A call, or what follows a graph break in it, that runs as it is, this once, instead of compiled."""

    function: str
    filename: str
    line: int
    thread: str
    ident: int
    start: float
    reason: str
    guarded: Guarded | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class RecompileLimit:
    """A function has as many graphs as its recompile limit allows: further ones run eagerly."""

    function: str
    filename: str
    line: int
    thread: str
    ident: int
    start: float
    limit: int
    count: int
    """How many graphs it has for this thread, these modules and devices."""
    reasons: tuple[tuple[str, str], ...]
    """Why it was compiled, also for others: the thread's name, and the reason."""


@dataclass(frozen=True)
class Call:
    """A call of a guarded callable that has ended."""

    function: str
    thread: str
    ident: int
    start: float
    seconds: float
    guarded: Guarded = field(repr=False, compare=False)


def _unexplained(entries: list[Any], frame: Any) -> tuple[str, ...]:
    return ()


explain: Callable[[list[Any], Any], tuple[str, ...]] = _unexplained
"""Tells why a frame is compiled, from the entries of Dynamo's cache that do not fit it. Set by ``observe``."""

write_log: Callable[[Any], None] = log.debug
"""Writes an event into the log. Set by ``observe``."""

_LOGGED = (Compile, EagerRun, RecompileLimit, Wait)

_Subscribers = tuple[tuple[Callable[[Any], None], tuple[type, ...]], ...]

# Replaced, never changed, so that it is read without a lock.
_subscribers: _Subscribers = ()
_changing = lock_across_forks()

# Guarded by the compile lock.
_current: tuple[Compile, contextvars.Context] | None = None


class Calls:
    """What a call looks at to learn whether it is counted, and whether somebody wants to be told of it."""

    __slots__ = ("counted", "wanted")  # which CPython reads sooner than what a class has
    clock = staticmethod(clock)

    def __init__(self, *, counted: bool) -> None:
        self.counted, self.wanted = counted, False

    @staticmethod
    def ended(guarded: Guarded, start: float) -> None:
        me = threading.current_thread()
        publish(Call(guarded.name, me.name, threading.get_ident(), start, clock() - start, guarded))


calls = Calls(counted=True)
"""What those of guarded callables look at."""


def subscribe(subscriber: Callable[[Any], None], *kinds: type) -> None:
    """Call ``subscriber`` with each event of these kinds, in the thread that it happened in, after it.

    For a ``Compile`` these are those that begin from now on, and the thread has the compile lock. The subscriber
    must be quick and must not wait for a thread. What it raises is logged.
    """
    with _changing:
        _set((*_subscribers, (subscriber, kinds)))


def unsubscribe(subscriber: Callable[[Any], None]) -> None:
    """Do not tell ``subscriber`` of what begins from now on."""
    with _changing:
        _set(tuple(one for one in _subscribers if one[0] is not subscriber))


def _set(subscribers: _Subscribers) -> None:
    global _subscribers  # noqa: PLW0603  of the process, as the compiles are
    _subscribers = subscribers
    calls.wanted = any(Call in kinds for _, kinds in subscribers)


def publish(event: Any, told: _Subscribers | None = None) -> None:
    """Tell an event to those who want it, of ``told`` or of all."""
    told = _subscribers if told is None else told
    if log.isEnabledFor(logging.INFO):
        told = (*told, (write_log, _LOGGED))
    for subscriber, kinds in told:
        if type(event) in kinds:
            try:
                subscriber(event)
            except Exception:
                # A compile, or a user's call, must not fail for somebody who watches it.
                log.exception("a subscriber to %s events has failed: %r", type(event).__name__, subscriber)


def current() -> tuple[Compile, contextvars.Context] | None:
    """Return what is being compiled, and the context in which that began. Call with the compile lock held."""
    return _current


def forget_other_threads() -> None:
    """Start anew in a forked process, whose only thread compiles nothing."""
    global _current  # noqa: PLW0603
    _current = None


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
        reasons: works out the reasons, before the work; called only if somebody wants to know.
        made: tells from what the work has returned whether it was a compile at all.
    """
    global _current  # noqa: PLW0603
    told = tuple(one for one in _subscribers if Compile in one[1])
    thread = threading.current_thread().name
    compile_ = replace(compile_, thread=thread, ident=threading.get_ident(), start=clock())
    if told or compile_.guarded or log.isEnabledFor(logging.INFO):
        compile_ = replace(compile_, reasons=reasons())
    before, _current = _current, (compile_, contextvars.copy_context())
    try:

        def tell(error: str | None = None) -> None:
            ended = replace(compile_, seconds=clock() - compile_.start, error=error)
            if ended.guarded:
                ended.guarded.compiled(ended.seconds, None if error else next(iter(ended.reasons), ""))
            publish(ended, told)

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
