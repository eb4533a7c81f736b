"""Threads that a compile starts, or gives work to: they are part of it."""

from __future__ import annotations

import concurrent.futures.thread
import functools
import threading
from collections.abc import Callable
from typing import Any

from safecompile._core.lock import FXTraceLock
from safecompile._core.waits import Hold, helpers
from safecompile._patches.point import PatchPoint
from safecompile._patches.thread_globals import EMPLOYER, ThreadGlobals


class HelperThreads(PatchPoint):
    name = "helper-threads"
    protects = "is_compiling() is False in threads that a backend starts, and a wait for them is not seen (D1)"
    upstream = "torch/compiler/__init__.py, is_compiling"

    def __init__(self, flags: ThreadGlobals, lock: FXTraceLock) -> None:
        """``flags`` holds what says that the calling thread compiles, under ``lock``."""
        super().__init__()
        self._flags, self._lock = flags, lock

    def needed(self) -> bool:
        return self._flags.active

    def apply(self) -> None:
        self.wrap(threading.Thread, "start", self._start)
        self.wrap(concurrent.futures.ThreadPoolExecutor, "submit", self._submit)

    def after_fork(self) -> None:
        for ident in set(helpers) - {threading.get_ident()}:
            del helpers[ident]

    def _start(self, start: Callable[[], None], thread: Any, args: Any, kwargs: Any) -> None:
        work = self._work()
        # A pool's thread goes on with other work; what it does for a compile is submitted to it.
        if work and thread._target is not concurrent.futures.thread._worker:
            run = thread.run

            def run_as_a_helper() -> None:
                vars(thread).pop("run", None)
                self._run(work, run)

            thread.run = run_as_a_helper
        start(*args, **kwargs)

    def _submit(self, submit: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        work = self._work()
        if work:
            args = (functools.partial(self._run, work, args[0]), *args[1:])
        return submit(*args, **kwargs)

    def _work(self) -> tuple[Hold, dict[str, Any]] | None:
        """Return what the calling thread does under the lock, or what it is a helper for."""
        own, hold = vars(self._flags.local), self._lock.work()
        work: tuple[Hold, dict[str, Any]] | None = own.get(EMPLOYER) if hold is None else (hold, own)
        return work if work and work[0].depth else None

    def _run(self, work: tuple[Hold, dict[str, Any]], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Let the calling thread be a helper while it runs the function."""
        me, own = threading.get_ident(), vars(self._flags.local)
        before = own.get(EMPLOYER)
        helpers[me], own[EMPLOYER] = work[0], work
        try:
            return function(*args, **kwargs)
        finally:
            own[EMPLOYER] = before
            if before is None:
                helpers.pop(me, None)
            else:
                helpers[me] = before[0]
