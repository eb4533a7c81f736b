"""Segmentation fault in `ensureCUDADeviceGuardSet`, on a machine without a GPU that has torch's CUDA build.

It comes when the thread that made the first compile of the process has ended, and another one compiles.
"""

from __future__ import annotations

from functools import partial

import torch

from safecompile.doctor._program import Case, NotApplicableError, elsewhere, fresh, program

__all__ = ["run"]


@program("C3", "a compile after the first compiling thread has ended ends the process", kind="crash", versions="2.11")
def run(case: Case) -> None:
    if torch.version.cuda is None or torch.cuda.is_available():
        raise NotApplicableError("needs a CUDA build of torch on a machine without a GPU")
    x = torch.ones(3, requires_grad=True)
    calls = [case.compile(fresh(number), backend="aot_eager") for number in range(5)]
    for call in calls[1:]:
        elsewhere(partial(call, x))
    calls[0](x).sum().backward()
