"""Gradients are silently wrong: a checkpointed region with dropout is recomputed with other random numbers.

`torch.utils.checkpoint` notes the state of the process's generator before the region and puts it back for the
recomputation. When another thread draws in the middle of the region, the recomputation gets other numbers.
"""

from __future__ import annotations

import torch
from torch.nn.functional import dropout

from safecompile.doctor._program import Case, company, elsewhere, fault, program

__all__ = ["run"]


@program("S1", "checkpoint recomputes with other random numbers: gradients are wrong", kind="silent")
def run(case: Case) -> None:
    runs: list[None] = []

    def region(x: torch.Tensor) -> torch.Tensor:
        runs.append(None)
        y = dropout(x.sin())
        if len(runs) == 1:
            elsewhere(lambda: torch.rand(64))
        return dropout(y.sin())

    x = torch.ones(64, requires_grad=True)
    with company():
        y = case.checkpoint(region, x)
        (grad,) = torch.autograd.grad(y.sum(), x)
    wrong = int(((y == 0) != (grad == 0)).sum())
    if wrong:
        fault(f"{wrong} of 64 gradients do not belong to the output: the recomputation dropped other elements")
