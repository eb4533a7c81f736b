"""The FX-trace lock: torch's own compile lock, with an owner, waiters and a limit on every wait."""

from __future__ import annotations

import functools
import logging
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

from safecompile._core import events
from safecompile._core.errors import LockTimeoutError, WaitCycleError
from safecompile._core.stacks import stacks_of_others
from safecompile._core.waits import Hold, waits_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

log = logging.getLogger("safecompile")

# Seconds between two looks at whether the holder waits for the waiting thread.
LOOK = 0.25
_NOTHING_NAMED = "holding the lock"

_P = ParamSpec("_P")
_R = TypeVar("_R")


class RawLock(Protocol):
    """The part of ``threading.RLock`` that is used."""

    def acquire(self, blocking: bool = ..., timeout: float = ...) -> bool: ...
    def release(self) -> None: ...
    def _is_owned(self) -> bool: ...


@dataclass(frozen=True)
class Waiter:
    """A thread that waits for the lock."""

    thread: str
    seconds: float


@dataclass(frozen=True)
class LockStatistics:
    """A snapshot of the lock. Seconds are of ``time.monotonic``."""

    locked: bool
    owner: str | None
    """Name of the owning thread."""
    doing: str | None
    """What the owner does with it, e.g. ``compiling forward (model.py:12)``."""
    held_seconds: float | None
    waiters: tuple[Waiter, ...]
    acquisitions: int
    """How often the lock was taken (nested takings not counted)."""
    contended: int
    """How many of those had to wait."""
    waited_seconds: float


@dataclass
class _Hold:
    ident: int
    thread: str
    since: float
    doing: str
    depth: int = 1
    did: str | None = None
    """The first thing with a name that it did."""


class FXTraceLock:
    """The one lock under which torch compiles: a context manager, a decorator, and ``acquire``/``release``.

    It *is* torch's compile lock (``source`` returns that lock), not a second one: two locks around
    compiling are taken in both orders as soon as a backend calls a compiled function. It is reentrant.
    Do not hold it while compiled code runs or across ``backward()``.

    Attributes:
        warn_after: seconds of waiting after which the log says who holds the lock (and again each time
            the waiting has doubled).
        limit: seconds after which a wait without a timeout of its own raises
            ``LockTimeoutError``.
    """

    def __init__(self, source: Callable[[], RawLock], *, warn_after: float = 30.0, limit: float = 1800.0) -> None:
        self._source = source
        self.warn_after = warn_after
        self.limit = limit
        # Written only by the thread that owns the lock; read by anyone for reports.
        self._hold: _Hold | None = None
        self._waiting: dict[int, tuple[str, float]] = {}
        self._acquisitions = 0
        self._contended = 0
        self._waited = 0.0
        self._waited_by: dict[int, float] = {}

    def acquire(self, timeout: float | None = None) -> bool:
        """Take the lock; return whether it was taken within ``timeout`` seconds.

        Without a timeout the wait is bounded by ``limit``.

        Raises:
            LockTimeoutError: no timeout was given and the limit passed; names the holder, with its stack.
            WaitCycleError: the holder waits for the calling thread, as two looks at their stacks have shown.
            ValueError: the timeout is negative.
        """
        if timeout is not None and not timeout >= 0:  # not a number is refused as well
            raise ValueError(f"timeout must be None or at least 0 seconds, not {timeout}")
        me = threading.get_ident()
        hold = self._hold
        if hold is not None and hold.ident == me:
            hold.depth += 1
            return True
        raw = self._source()
        nested = raw._is_owned()
        try:
            waited = None
            if not raw.acquire(blocking=False):
                waited = self._wait(raw, timeout) if timeout != 0 else None
                if waited is None:
                    return False
            self._acquisitions += 1
            self._hold = _Hold(me, threading.current_thread().name, time.monotonic(), _NOTHING_NAMED)
            if waited is not None:
                events.publish(waited)  # now that everybody can see who has the lock
        except BaseException:
            # A KeyboardInterrupt may arrive after the raw lock was taken and before anyone knows it.
            if raw._is_owned() and not nested:
                self._hold = None
                raw.release()
            raise
        return True

    def release(self) -> None:
        """Give the lock back.

        Raises:
            RuntimeError: the calling thread does not hold it.
        """
        hold = self._hold
        if hold is None or hold.ident != threading.get_ident():
            raise RuntimeError("cannot release the FX-trace lock: the calling thread does not hold it")
        raw = self._source()
        hold.depth -= 1
        if hold.depth == 0:
            try:
                self._hold = None
            finally:
                raw.release()

    def __enter__(self) -> FXTraceLock:  # noqa: PYI034  Self is newer than Python 3.10
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """Decorate ``function`` to run with the lock held."""

        @functools.wraps(function)
        def locked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with self:
                return function(*args, **kwargs)

        return locked

    def forget_other_threads(self) -> None:
        """Start anew in a forked process, in which the calling thread is the only one and does not hold the lock."""
        self._hold = None
        self._waiting.clear()
        self._waited_by.clear()

    def waited_by(self, thread: int) -> float:
        """Return how many seconds the thread with this ident has waited for the lock."""
        return self._waited_by.get(thread, 0.0)

    def owned(self) -> bool:
        """Tell whether the calling thread holds the lock."""
        hold = self._hold
        return hold is not None and hold.ident == threading.get_ident()

    def others(self) -> set[threading.Thread]:
        """Return the threads that hold the lock or wait for it, without the calling one."""
        hold = self._hold
        idents = {*list(self._waiting), hold.ident if hold else None} - {threading.get_ident()}
        return {thread for thread in threading.enumerate() if thread.ident in idents}

    def work(self) -> Hold | None:
        """Return that the calling thread holds the lock, if it does something with it that it has named."""
        hold = self._hold
        return hold if hold is not None and self.owned() and hold.doing != _NOTHING_NAMED else None

    def held_by(self) -> str:
        """Say who holds the lock, since when and for what."""
        hold = self._hold
        if hold is None:
            return "another thread holds the FX-trace lock"
        return f"thread {hold.thread!r} has held the FX-trace lock for {time.monotonic() - hold.since:.1f} s ({hold.doing})"

    def owned_by_torch(self) -> bool:
        """Tell whether the calling thread holds the lock by way of torch's own object: it is inside a compile."""
        return not self.owned() and self._source()._is_owned()

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Say what the calling thread, which holds the lock, does with it."""
        hold = self._hold
        if hold is None:
            yield
            return
        before, hold.doing = hold.doing, what
        hold.did = hold.did or what
        try:
            yield
        finally:
            hold.doing = before

    def statistics(self) -> LockStatistics:
        """Return who holds the lock, since when and for what, who waits, and the counts so far."""
        now = time.monotonic()
        hold = self._hold
        return LockStatistics(
            locked=hold is not None,
            owner=hold.thread if hold else None,
            doing=hold.doing if hold else None,
            held_seconds=now - hold.since if hold else None,
            waiters=tuple(Waiter(name, now - since) for name, since in list(self._waiting.values())),
            acquisitions=self._acquisitions,
            contended=self._contended,
            waited_seconds=self._waited,
        )

    def _wait(self, raw: RawLock, timeout: float | None) -> events.Wait | None:
        """Take the lock, and return what the wait was, or ``None`` if the time was over."""
        me, name, start = threading.get_ident(), threading.current_thread().name, time.monotonic()
        first, began, taken = self._hold, events.clock(), False

        def ended() -> events.Wait:
            holder, doing = (first.thread, first.did or first.doing) if first else (None, None)
            return events.Wait(name, me, began, self._waited_by[me] - before, holder, doing)

        before = self.waited_by(me)
        deadline = start + (self.limit if timeout is None else timeout)
        pause = max(self.warn_after, 0.1)
        in_a_cycle: _Hold | None = None
        self._waiting[me] = (name, start)
        try:
            while True:
                now = time.monotonic()
                if raw.acquire(timeout=max(0.0, min(deadline - now, start + pause - now, LOOK))):
                    # Counted by the new owner, so that no count is lost to a race.
                    self._contended += 1
                    self._waited += time.monotonic() - start
                    taken = True
                    break
                hold = self._hold
                if timeout is None and hold is not None and waits_for(hold.ident, me):
                    if in_a_cycle is hold:
                        raise WaitCycleError(self._report(name, time.monotonic() - start), me)
                    in_a_cycle = hold
                else:
                    in_a_cycle = None
                now = time.monotonic()
                if now >= deadline:
                    if timeout is not None:
                        return None
                    raise LockTimeoutError(self._report(name, now - start))
                if now >= start + pause:
                    log.warning("%s", self._report(name, now - start, stack=False))
                    pause *= 2
        finally:
            self._waiting.pop(me, None)
            self._waited_by[me] = before + events.clock() - began
            if not taken:
                events.publish(ended())
        return ended()

    def _report(self, waiter: str, waited: float, *, stack: bool = True) -> str:
        hold = self._hold
        if hold is None:
            return (
                f"thread {waiter!r} has waited {waited:.1f} s for the FX-trace lock, which a thread took by way of "
                "torch's own lock object; install() before that code runs makes the holder known."
            )
        held = time.monotonic() - hold.since
        text = (
            f"thread {waiter!r} has waited {waited:.1f} s for the FX-trace lock, "
            f"which thread {hold.thread!r} has held for {held:.1f} s ({hold.doing})."
        )
        if not stack:
            return text
        frames = stacks_of_others().get(hold.ident, [])
        lines = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in reversed(frames)).format()
        where = "".join(lines) or "  (the holder has ended)\n"
        return (
            f"{text}\nIf that work is only slow, raise fx_trace_lock.limit (now {self.limit:.0f} s). If it waits for "
            f"this thread, let it not do so while it compiles. The holder's stack:\n{where}"
        )
