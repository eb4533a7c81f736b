"""Single flight: whoever would compile what another thread has just compiled looks again instead.

Dynamo looks in its cache, misses, waits for the compile lock, and compiles, without looking again. The
gate closes that hole with a counter, the *epoch*. A guarded call notes the epoch before it looks in the
cache. When it is about to compile, under the lock, it asks ``Gate.admit`` whether an entry for the
same code was finished after the noted epoch; if so, it must look again, and Dynamo's own guards decide.
Warm calls only read ``Gate.epoch``: they take no lock and write nothing.

The entry becomes visible a moment *after* the compiling thread has given the lock back (C++ inserts it),
so the epoch advances only when every finished entry has been seen in place: whoever reads epoch ``e``
finds all entries finished up to ``e``.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

# A compiled entry is inserted some microseconds after the lock is released. One that is not there after
# this many seconds never will be (the insertion raised); the next thread then compiles for itself.
INSERTION_LIMIT = 10.0


class LookAgain(BaseException):
    """Internal: nothing of the user's function has run; call it again, the cache has a new entry."""


@dataclass
class _Finished:
    epoch: int
    thread: int
    inserted: Callable[[], bool]


class Gate:
    """Decides, under the compile lock, whether a thread compiles or looks in the cache again."""

    def __init__(self) -> None:
        # Read by every guarded call without a lock. 0: the patches are not installed.
        self.epoch = 0
        # The rest is guarded by the compile lock.
        self._serial = 0
        self._finished: dict[Hashable, _Finished] = {}
        self._pending: list[_Finished] = []
        self._compiled: dict[int, int] = {}
        self.looked_again = 0

    @property
    def compiled(self) -> int:
        """How many entries were finished, by all threads."""
        return sum(list(self._compiled.values()))

    def compiled_by(self, thread: int) -> int:
        """How many entries the thread with this ident finished."""
        return self._compiled.get(thread, 0)

    def open(self) -> int:
        """Start (or go on) counting, and return the epoch, which is at least 1. Call with the lock held."""
        self.forget_pending()  # from before an uninstallation, and in place or gone since
        self._serial += 1
        self.epoch = self._serial
        return self.epoch

    def close(self) -> None:
        """Make the next guarded call install the patches again."""
        self.epoch = 0

    def admit(self, code: Any, seen: int) -> bool:
        """Tell whether a thread that noted epoch ``seen`` may compile ``code``. Call with the lock held."""
        self._settle()
        finished = self._finished.get(id(code))
        # While Dynamo is about to be reset there is no epoch to wait for; calls in flight are to end.
        if finished is None or finished.epoch <= seen or not self.epoch:
            return True
        self.looked_again += 1
        return False

    def finished_elsewhere(self, code: Any) -> bool:
        """Tell whether another thread ever finished an entry for ``code``. Call with the lock held."""
        self._settle()
        finished = self._finished.get(id(code))
        return finished is not None and finished.thread != threading.get_ident()

    def finish(self, code: Any, inserted: Callable[[], bool]) -> None:
        """Record that an entry for ``code`` was made. Call with the lock held.

        Args:
            code: the code object; weakly referenced.
            inserted: tells whether the entry is in the cache, or will never be.
        """
        self._serial += 1
        me = threading.get_ident()
        self._compiled[me] = self._compiled.get(me, 0) + 1
        key = id(code)
        if key not in self._finished:
            weakref.finalize(code, self._finished.pop, key, None).atexit = False
        record = _Finished(self._serial, me, inserted)
        self._finished[key] = record
        self._pending.append(record)

    def forget_pending(self) -> None:
        """Stop waiting for entries to be inserted: the cache was emptied. Call with the lock held."""
        self._pending.clear()

    def _settle(self) -> None:
        me = threading.get_ident()
        for record in self._pending:
            # A thread's own earlier entries are in place, or never will be: it has come back from there.
            deadline = time.monotonic() + (0.0 if record.thread == me else INSERTION_LIMIT)
            while not record.inserted() and time.monotonic() < deadline:
                time.sleep(0.0001)
        self._pending.clear()
        if self.epoch:
            self.epoch = self._serial
