"""Every compiled region is compiled twice, the second time in backward, under `use_reentrant=True`.

The reentrant kind runs the forward without grad, and the recomputation with it: another graph. With safecompile:
`safecompile.checkpoint`, which is never reentrant.
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from safecompile.doctor._program import Case, CountingBackend, fault, program

__all__ = ["run"]


@program("T1", "reentrant checkpoint compiles every region twice", kind="slow")
def run(case: Case) -> None:
    backend, x = CountingBackend(), torch.ones(3, requires_grad=True)
    call = case.compile(lambda x: x.sin(), backend=backend)
    y = case.checkpoint(call, x) if case.library else torch_checkpoint(call, x, use_reentrant=True)
    y.sum().backward()
    if backend.count > 1:
        fault(f"one region, one shape: {backend.count} compiles")
