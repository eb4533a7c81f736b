"""One task in each worker of a thread pool, exactly once: they meet, one works alone, then all the others do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

from safecompile._core.errors import WarmupTimeoutError

_R = TypeVar("_R")


def in_each_worker(executor: ThreadPoolExecutor, work: Callable[[bool], _R], timeout: float) -> list[_R]:
    """Call ``work`` once in each worker, and return what the calls return, that of the first worker first.

    The first call is ``work(True)``, alone; when it has returned, all others are ``work(False)`` at the same time. A
    worker that was free earlier would take two tasks and leave another with none, so that none begins before all meet.

    Args:
        executor: has a worker for each of its ``max_workers``, or starts it.
        work: is not called for the rest of the workers once a call has failed.
        timeout: seconds within which they meet. How long the work takes is not limited.

    Raises:
        WarmupTimeoutError: too few workers were free; nothing was called.
        RuntimeError: the pool was shut down, or the initializer of a worker failed; nothing was called.
        BaseException: the first that a call raised, when all have ended.
    """
    meeting = _Meeting(work, executor._max_workers)
    futures: list[Future[None]] = []
    try:
        for _ in range(meeting.size):
            futures.append(executor.submit(meeting.attend))
            futures[-1].add_done_callback(meeting.ended)
        meeting.wait(timeout)
        wait(futures)
    except BaseException:
        if not meeting.call_off():
            # What is cancelled stays in the pool's queue, as something that is not run; the others end at once.
            wait([future for future in futures if not future.cancel()])
        raise
    try:
        if meeting.error is not None:
            raise meeting.error
    finally:
        meeting.error = None  # its traceback has the meeting
    return [meeting.results[number] for number in range(meeting.size)]


class _Meeting(Generic[_R]):
    def __init__(self, work: Callable[[bool], _R], size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        # The rest is guarded by _changed.
        self._work: Callable[[bool], _R] | None = work
        self._met = 0
        self.results: dict[int, _R] = {}
        self.error: BaseException | None = None

    def attend(self) -> None:
        """Work when it is this worker's turn, unless the meeting is called off."""
        with self._changed:
            if self._work is None:
                return
            number = self._met
            self._met += 1
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._work is None or (self._met == self.size and (number == 0 or self.results))
            )
            work = self._work
        try:
            if work is not None:
                result = work(number == 0)
                with self._changed:
                    self.results[number] = result
                    self._changed.notify_all()
        except BaseException as error:
            self.call_off(error)

    def wait(self, timeout: float) -> None:
        """Wait until all have come."""
        with self._changed:
            limit = min(timeout, threading.TIMEOUT_MAX)
            in_time = self._changed.wait_for(lambda: self._work is None or self._met == self.size, limit)
            if self._met == self.size:
                return
            self.call_off()
        came = f"{self._met} of {self.size} workers of the executor"
        if in_time:
            raise RuntimeError(
                f"{came} met: then it was shut down, or a worker's initializer failed. Give another one."
            )
        raise WarmupTimeoutError(
            f"{came} met within {timeout:g} s: the others were busy. Nothing was compiled, and no task is left in the "
            "executor. Warm up before it is given work, or give more time (timeout=)."
        )

    def call_off(self, error: BaseException | None = None) -> bool:
        """Let go of those who have not begun; tell whether any may have."""
        with self._changed:
            self._work = None
            self.error = self.error or error
            self._changed.notify_all()
            return self._met == self.size

    def ended(self, _: Future[None]) -> None:
        """Call it off if a task has ended before all have come: it was cancelled, or there was nobody to do it."""
        if self._met < self.size:
            self.call_off()
