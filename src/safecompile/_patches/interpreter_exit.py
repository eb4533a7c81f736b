"""The end of the main thread while other threads compile."""

from __future__ import annotations

import concurrent.futures.process  # noqa: F401  Inductor imports it, and it cannot be imported while the interpreter ends
import ctypes
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
import wrapt

from safecompile._core.lock import FXTraceLock
from safecompile._patches.point import PatchPoint

# Seconds that a daemon thread in a compile gets to end: a C++ compiler that it waits for comes first.
DAEMONS_LIMIT = 60.0


class InterpreterExit(PatchPoint):
    name = "interpreter-exit"
    protects = 'a compile dies of "cannot schedule new futures after interpreter shutdown" when main ends (D3)'
    upstream = "diffusers#3764; torch/_inductor/async_compile.py, AsyncCompile.submit"
    relies_on = ("threading:_register_atexit",)

    def __init__(self, lock: FXTraceLock) -> None:
        super().__init__()
        self._lock = lock
        self._registered = self._exiting = False

    def apply(self) -> None:
        if not self._registered:
            self._registered = True
            threading._register_atexit(self._wait)  # type: ignore[attr-defined]  # called before pools are shut down

    def _wait(self) -> None:
        """Let compiles end that need a pool, and daemon threads that compile end at once.

        The interpreter would end a daemon where it next takes the interpreter lock; below C++ frames of torch that
        aborts the process.
        """
        if not self.active:
            return
        self._exiting = True
        self.wrap(threading, "excepthook", _report_unless_ending)
        start = time.monotonic()
        ending: set[threading.Thread] = set()
        while threads := {thread for thread in self._lock.others() | ending if thread.is_alive()}:
            limits = {DAEMONS_LIMIT if thread.daemon else self._lock.limit for thread in threads}
            if time.monotonic() - start > max(limits):
                break
            for thread in {thread for thread in threads if thread.daemon} - ending:
                ending.add(thread)
                _raise_in(thread, SystemExit)
            time.sleep(0.001)

    def before_compile(self) -> None:
        """Let what the calling thread compiles do without a pool, if there is none any more.

        Raises:
            SystemExit: the interpreter ends, and the calling thread is a daemon.
        """
        if self._exiting:
            if threading.current_thread().daemon:
                raise SystemExit
            from torch._inductor.async_compile import AsyncCompile

            if not isinstance(AsyncCompile.submit, wrapt.BoundFunctionWrapper):
                self.wrap(AsyncCompile, "submit", lambda _, __, args, ___: _Later(args[0]))
                self.wrap(AsyncCompile, "use_process_pool", lambda *_: False)


def _raise_in(thread: threading.Thread, error: type[BaseException]) -> None:
    """Raise an exception in another thread, as soon as it runs Python code."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(error))


def _report_unless_ending(report: Callable[..., None], _: Any, args: Any, kwargs: Any) -> None:
    """Report no error in torch from a daemon thread: its modules and pools are taken away, and it is about to end."""
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(args[0].exc_traceback))
    if not (args[0].thread.daemon and any(file.startswith(torch.__path__[0]) for file in files)):
        report(*args, **kwargs)


class _Later(Future[Any]):
    """Does a task when its result is asked for: while tasks are submitted, Inductor has a file lock that they take."""

    def __init__(self, task: Callable[[], Any]) -> None:
        super().__init__()
        self._task = task

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            try:
                self.set_result(self._task())
            except Exception as error:
                self.set_exception(error)
        return super().result(timeout)
