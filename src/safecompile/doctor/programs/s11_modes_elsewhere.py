"""A worker compiles once more, or answers in another dtype, under `no_grad`, `inference_mode` or `autocast`.

These modes belong to the thread that entered them: a pool that the main thread feeds inside one computes without it.
With safecompile: `capture_context`.
"""

from __future__ import annotations

import torch

from safecompile.doctor._program import Case, CountingBackend, elsewhere, fault, program

__all__ = ["run"]


@program("S11", "a worker computes without the caller's autocast or grad mode", kind="silent")
def run(case: Case) -> None:
    backend, linear, x = CountingBackend(), torch.nn.Linear(4, 4), torch.ones(2, 4)
    call = case.compile(lambda x: linear(x), backend=backend)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        mine = call(x)
        carried = case.carry()
        got = elsewhere(lambda: carried(call, x))
    if backend.count > 1 or got.dtype != mine.dtype:
        fault(f"{backend.count} compiles; the main thread gets {mine.dtype}, and a worker {got.dtype}")
