"""Threads that hand work to each other, and end together: the first error stops them all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

from safecompile import capture_context

T = TypeVar("T")


class Stopped(Exception):  # noqa: N818  # no error, but how a waiting thread learns that all is over
    """Raised in a thread that waits for others when the run is over for all."""


class WorkerError(RuntimeError):
    """A thread failed; the cause is its own exception.

    Attributes:
        worker: the thread's name.
        still_running: names of the threads that had not ended in time after it.
    """

    def __init__(self, worker: str, error: BaseException, still_running: list[str]) -> None:
        going_on = f" (still running: {', '.join(still_running)})" if still_running else ""
        super().__init__(f"thread {worker!r} failed: {type(error).__name__}: {error}{going_on}")
        self.worker = worker
        self.still_running = still_running


class OrderedQueue(Generic[T]):
    """A bounded queue that many threads fill in any order and one empties in the order of the items' numbers.

    Items may come early, but none is taken in that is `depth` or more ahead of the next one to leave. As numbers are given
    out in order, the next one to leave always finds room, so the bound cannot lock anybody out.

    Args:
        depth: see above.
        first: number of the item that leaves first.
    """

    def __init__(self, depth: int, first: int = 0) -> None:
        self._depth = depth
        self._changed = threading.Condition()
        self._items: dict[int, T] = {}  # guarded by _changed, like the two below
        self._next = first
        self._stopped = False

    def __len__(self) -> int:
        """Items that are ready to leave or came early."""
        return len(self._items)

    def admit(self, number: int) -> None:
        """Wait for room for item ``number``, which is kept for it from then on.

        Raises:
            Stopped: if the run is over.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or number < self._next + self._depth)
            if self._stopped:
                raise Stopped

    def put(self, number: int, item: T) -> None:
        """Put item ``number``, waiting for room.

        Raises:
            Stopped: if the run is over.
        """
        with self._changed:
            self.admit(number)
            self._items[number] = item
            self._changed.notify_all()

    def get(self) -> T:
        """Take the next item in order, waiting for it.

        Raises:
            Stopped: if the run is over.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._next in self._items)
            if self._stopped:
                raise Stopped
            item = self._items.pop(self._next)
            self._next += 1
            self._changed.notify_all()
            return item

    def ready(self) -> bool:
        """Tell whether the next item in order is there."""
        return self._next in self._items

    def check(self) -> None:
        """Raise `Stopped` if the run is over, without waiting."""
        if self._stopped:
            raise Stopped

    def stop(self) -> None:
        """End every wait, now and later, with `Stopped`."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


class Meeting:
    """A barrier for a fixed number of threads whose waits end with `Stopped` when the run is over.

    All or none: where the last party has come before the stop, every wait of that meeting ends as if there had been no stop, however
    late its thread wakes up. A `threading.Barrier` that is aborted then lets some threads pass and not others, which would
    leave replicas of one model a step apart.
    """

    def __init__(self, parties: int) -> None:
        self._parties = parties
        self._changed = threading.Condition()
        self._here = 0  # guarded by _changed, like the two below
        self._meetings = 0
        self._stopped = False

    def wait(self) -> None:
        """Wait until all parties are here.

        Raises:
            Stopped: if the run is over.
        """
        with self._changed:
            if self._stopped:
                raise Stopped
            meeting = self._meetings
            self._here += 1
            if self._here == self._parties:
                self._here = 0
                self._meetings += 1
                self._changed.notify_all()
                return
            self._changed.wait_for(lambda: self._stopped or self._meetings > meeting)
            if self._meetings == meeting:
                raise Stopped

    def stop(self) -> None:
        """End every wait, now and later, with `Stopped`, except for those of a meeting that all have come to."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


class Tickets(Generic[T]):
    """An iterator that several threads share: each item goes to one of them, and items are given out in order."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        with self._lock:
            return next(self._items)


class Member(NamedTuple):
    """A thread of a crew, and the event that it has ended.

    Not ``Thread.is_alive``: an interrupt (Ctrl-C) inside ``Thread.join`` makes Python 3.11 take a running thread for ended.
    """

    thread: threading.Thread
    ended: threading.Event


class Crew:
    """A group of named threads that ends as one.

    Args:
        stops: called, in any thread, when a thread fails or `stop` is called; they must end every wait between the threads.
    """

    def __init__(self, stops: Iterable[Callable[[], None]]) -> None:
        self._stops = list(stops)
        self._members: list[Member] = []
        self._lock = threading.Lock()
        self._failure: tuple[str, BaseException] | None = None  # guarded by _lock; the first one stays

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Start a thread that runs ``work`` with the torch settings of this one.

        What belongs to a thread in torch (gradient mode, autocast, default device, compiler configuration) starts from the
        defaults in a new one; `capture_context` carries this thread's settings over.
        """
        context = capture_context()
        ended = threading.Event()

        def run() -> None:
            try:
                context.run(work)
            except Stopped:
                pass
            except BaseException as error:  # whatever it is, it ends the run and is raised in `check`
                with self._lock:
                    self._failure = self._failure or (name, error)
                self.stop()
            finally:
                ended.set()

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._members.append(Member(thread, ended))  # before it starts: an interrupt must not lose it
        thread.start()

    def stop(self) -> None:
        """Ask all threads to end."""
        for stop in self._stops:
            stop()

    def running(self) -> list[str]:
        """Return the names of the threads that have begun and not ended."""
        return [m.thread.name for m in self._running()]

    def wait(self, tick: Callable[[], None] = lambda: None) -> None:
        """Wait until all threads have ended or one has failed; ``tick`` is called in this thread about ten times a second."""
        while not self._failure and (running := self._running()):
            running[0].ended.wait(timeout=0.1)
            tick()

    def end(self, grace: float = 8.0) -> None:
        """Stop all threads and wait until they have ended, for at most ``grace`` seconds.

        A thread inside a long operation, such as a compile, cannot be stopped, and may be left behind.
        """
        if self._running():
            self.stop()
        deadline = time.monotonic() + grace
        for member in self._running():
            member.ended.wait(timeout=max(0.0, deadline - time.monotonic()))

    def check(self) -> None:
        """Raise `WorkerError` from the error of the first thread that failed, if any did."""
        if self._failure:
            name, error = self._failure
            raise WorkerError(name, error, self.running()) from error

    def join(self, grace: float = 8.0, tick: Callable[[], None] = lambda: None) -> None:
        """Wait for all threads; once one has failed or this one is interrupted (Ctrl-C), end them all.

        Raises:
            WorkerError: from the error of the first thread that failed.
        """
        try:
            self.wait(tick)
        finally:
            self.end(grace)
        self.check()

    def _running(self) -> list[Member]:
        return [m for m in self._members if m.thread.ident is not None and not m.ended.is_set()]
