"""Threads that a compile starts, or gives work to: they are part of it."""

from __future__ import annotations

import concurrent.futures.thread
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from safecompile._core.lock import FXTraceLock
from safecompile._core.waits import helpers
from safecompile._patches.point import PatchPoint
from safecompile._patches.thread_globals import EMPLOYER, ThreadGlobals

__all__ = ["HelperThreads"]


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

    def mismatch(self) -> str | None:
        return None

    def apply(self) -> None:
        self.wrap(threading.Thread, "start", self._start)
        self.wrap(concurrent.futures.ThreadPoolExecutor, "submit", self._submit)

    def _start(self, start: Callable[[], None], thread: Any, args: Any, kwargs: Any) -> None:
        # A pool's thread goes on with other work; what it does for a compile is submitted to it.
        if self._compiles() and thread._target is not concurrent.futures.thread._worker:
            thread.run = functools.partial(self._run, self._working(), thread.run)
        start(*args, **kwargs)

    def _submit(self, submit: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        if self._compiles():
            args = (functools.partial(self._run, self._working(), args[0]), *args[1:])
        return submit(*args, **kwargs)

    def _compiles(self) -> bool:
        return self._lock.working() or threading.get_ident() in helpers

    def _working(self) -> Any:
        return self._work(threading.get_ident(), vars(self._flags.local))

    def _run(self, working: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with working:
            return function(*args, **kwargs)

    @contextmanager
    def _work(self, employer: int, values: dict[str, Any]) -> Iterator[None]:
        """Let the calling thread be a helper of the thread with this ident and these flags."""
        me, own = threading.get_ident(), vars(self._flags.local)
        before = helpers.get(me), own.get(EMPLOYER)
        helpers[me], own[EMPLOYER] = employer, values
        try:
            yield
        finally:
            own[EMPLOYER] = before[1]
            if before[0] is None:
                helpers.pop(me)
            else:
                helpers[me] = before[0]
