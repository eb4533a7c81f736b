"""Random numbers are drawn twice: a compile puts the process's generators back to where they were when it began.

What another thread draws meanwhile (noise, dropout, shuffled data) it draws again after the compile.
"""

from __future__ import annotations

import torch

from safecompile.doctor._program import Case, CountingBackend, fault, program

__all__ = ["run"]


@program("S2", "a compile rewinds the random numbers of other threads", kind="silent")
def run(case: Case) -> None:
    backend = CountingBackend(gated=True)
    call = case.compile(lambda x: x.sin(), backend=backend)
    with backend.compiling(call, torch.ones(3)):
        during = set(torch.rand(16, dtype=torch.float64).tolist())
    again = during & set(torch.rand(16, dtype=torch.float64).tolist())
    if again:
        fault(f"{len(again)} of 16 numbers that were drawn during a compile came again after it")
