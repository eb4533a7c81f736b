"""Warm calls stall while another thread compiles: what the usual remedy, a lock around all calls, costs.

Nothing that torch does by itself: without safecompile the calls here go through such a lock.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from safecompile.doctor._program import Case, CountingBackend, example, fault, program

__all__ = ["run"]


@program("T2", "warm calls stall behind a lock around calls while a thread compiles", kind="slow")
def run(case: Case) -> None:
    lock: AbstractContextManager[Any] = nullcontext() if case.library else threading.Lock()
    x, backend, done = example(), CountingBackend(gated=True), threading.Event()
    warm, cold = case.compile(lambda x: x.cos(), backend="eager"), case.compile(lambda x: x.sin(), backend=backend)
    warm(x)

    def locked(call: Any) -> None:
        with lock:
            call(x)

    def call() -> None:
        locked(warm)
        done.set()

    thread = threading.Thread(target=call)
    with backend.compiling(locked, cold):
        thread.start()
        stalls = not done.wait(case.patience)
    thread.join()
    if stalls:
        fault(f"a warm call had not returned after {case.patience:g} s, while another thread compiled")
