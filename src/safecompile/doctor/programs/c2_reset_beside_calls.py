"""Segmentation fault or abort: `torch.compiler.reset()` frees compiled code that other threads are running.

With safecompile: `safecompile.reset`, which waits for calls in flight and holds new ones.
"""

from __future__ import annotations

import sys
import threading
import time
from functools import partial

import torch

from safecompile.doctor._program import Case, attempt, fresh, program, together

__all__ = ["run"]


@program("C2", "reset() beside a running call ends the process", kind="crash", upstream="pytorch#193697")
def run(case: Case) -> str:
    calls, x, done = [case.compile(fresh(n), backend="eager") for n in range(4)], torch.ones(3), threading.Event()
    resets = 0

    def work() -> None:
        while not done.is_set():
            for n, call in enumerate(calls):
                attempt("a call beside reset()", partial(call, x), (x + n).sin())

    def reset() -> None:
        nonlocal resets
        end = time.monotonic() + 5
        try:
            while time.monotonic() < end:
                case.reset()
                calls[0](x)
                resets += 1
        finally:
            done.set()

    sys.setswitchinterval(1e-5)
    together(reset, work, work, work, work)
    return f"{resets} resets"
