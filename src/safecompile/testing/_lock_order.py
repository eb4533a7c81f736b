"""For the tests of programs with threads: a checker of the order in which locks are taken.

Two threads that take the same two locks in opposite orders can deadlock. A test seldom meets that moment; the order is
wrong in every run. The checker remembers which lock was ever taken while which other was held, and raises as soon as
the orders contradict each other, whether or not threads meet.
"""

from __future__ import annotations

import itertools
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from safecompile._core.errors import SafeCompileError
from safecompile._core.lock import FXTraceLock
from safecompile._installation import install
from safecompile._patches import fx_trace_lock

__all__ = ["LockOrder", "LockOrderError", "lock_order"]


class LockOrderError(SafeCompileError, AssertionError):
    """Locks are taken in orders that can deadlock."""


class LockOrder:
    """The orders in which locks were taken so far."""

    def __init__(self) -> None:
        self._guard = _Lock()
        self._numbers = itertools.count()
        # By the numbers of two locks: where the second was taken while the first was held.
        self._after: dict[int, dict[int, str]] = {}
        self._names: dict[int, str] = {}
        self._held = threading.local()
        self._first: LockOrderError | None = None

    def watch(self, lock: Any, name: str) -> _WatchedLock:
        """Return a lock to use in the place of ``lock``, whose order is checked; errors call it ``name``."""
        return _WatchedLock(self, lock, self._number(name))

    def check(self) -> None:
        """Raise the first error again that any thread got.

        Raises:
            LockOrderError: two orders contradict each other.
        """
        if self._first is not None:
            raise self._first

    def _number(self, name: str) -> int:
        number = next(self._numbers)
        self._names[number] = name
        return number

    def _mine(self) -> list[int]:
        if not hasattr(self._held, "locks"):
            self._held.locks = []
        locks: list[int] = self._held.locks
        return locks

    def _before(self, lock: int) -> None:
        """Note that the calling thread is about to wait for ``lock``."""
        held = self._mine()
        if lock in held:
            return
        here = "".join(traceback.format_stack(sys._getframe(2), limit=6))
        with self._guard:
            for one in dict.fromkeys(held):
                way = self._way(lock, one)
                if way:
                    self._fail(one, lock, here, way)
                self._after.setdefault(one, {}).setdefault(lock, here)

    def _way(self, start: int, end: int) -> list[tuple[int, int]] | None:
        """Return the pairs in which locks were taken from ``start`` to ``end``."""
        ways: dict[int, list[tuple[int, int]]] = {start: []}
        todo = [start]
        while todo:
            one = todo.pop()
            for other in self._after.get(one, {}):
                if other not in ways:
                    ways[other] = [*ways[one], (one, other)]
                    todo.append(other)
        return ways.get(end)

    def _fail(self, held: int, lock: int, here: str, way: list[tuple[int, int]]) -> None:
        name = self._names
        before = "\n".join(f"{name[b]} was taken while {name[a]} was held:\n{self._after[a][b]}" for a, b in way)
        error = LockOrderError(
            f"thread {threading.current_thread().name!r} takes {name[lock]} while it holds {name[held]}, and the other "
            f"way round was seen before: two threads can wait for each other for ever. Take them in one order.\n"
            f"Now:\n{here}\nBefore, {before}"
        )
        self._first = self._first or error
        raise error


class _WatchedLock:
    """Stands for a ``Lock`` or an ``RLock``, also inside a ``Condition``."""

    def __init__(self, order: LockOrder, lock: Any, number: int) -> None:
        self._order, self._lock, self._number = order, lock, number
        if hasattr(lock, "_release_save"):  # what Condition asks a reentrant lock for
            self._is_owned, self._release_save, self._acquire_restore = (
                lock._is_owned,
                self._save,
                self._restore,
            )

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if blocking:  # one that does not wait can not wait for ever
            self._order._before(self._number)
        taken: bool = self._lock.acquire(blocking, timeout)
        if taken:
            self._order._mine().append(self._number)
        return taken

    def release(self) -> None:
        self._lock.release()
        held = self._order._mine()
        if self._number in held:  # a plain lock may be released by another thread
            held.reverse()
            held.remove(self._number)
            held.reverse()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)

    def _save(self) -> Any:
        held = self._order._mine()
        count = held.count(self._number)
        held[:] = [one for one in held if one != self._number]
        return count, self._lock._release_save()

    def _restore(self, state: Any) -> None:
        count, inner = state
        self._lock._acquire_restore(inner)
        self._order._mine().extend([self._number] * count)


_Lock, _RLock = threading.Lock, threading.RLock


@contextmanager
def lock_order() -> Iterator[LockOrder]:
    """Check the order of ``fx_trace_lock`` and of all locks that are made inside the ``with`` block, in any thread.

    Locks that exist already are checked if ``LockOrder.watch`` wraps them. Use it in one test at a time.

    Raises:
        LockOrderError: in the thread that takes a lock in the wrong order, before it waits; and at the end of the
            block, if any thread has got it.
    """
    install()
    order = LockOrder()
    fx = order._number("fx_trace_lock")

    def made(make: Any) -> Any:
        def lock() -> _WatchedLock:
            frame = sys._getframe(1)
            return order.watch(make(), f"the lock made in {frame.f_code.co_filename}:{frame.f_lineno}")

        return lock

    acquire, release = FXTraceLock.acquire, FXTraceLock.release

    def acquire_watched(self: FXTraceLock, timeout: float | None = None) -> bool:
        if self is not fx_trace_lock:
            return acquire(self, timeout)
        if timeout is None:
            order._before(fx)
        taken = acquire(self, timeout)
        if taken:
            order._mine().append(fx)
        return taken

    def release_watched(self: FXTraceLock) -> None:
        release(self)
        if self is fx_trace_lock:
            order._mine().remove(fx)

    threading.Lock, threading.RLock = made(_Lock), made(_RLock)
    FXTraceLock.acquire, FXTraceLock.release = acquire_watched, release_watched  # type: ignore[method-assign]
    try:
        yield order
    finally:
        threading.Lock, threading.RLock = _Lock, _RLock
        FXTraceLock.acquire, FXTraceLock.release = acquire, release  # type: ignore[method-assign]
    order.check()
