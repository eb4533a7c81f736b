"""Eager code takes the branch that is meant for compiling: `torch.compiler.is_compiling()` is True in it.

Optimizers and models ask this function. It answers for the process: while any thread compiles or exports, for all.
"""

from __future__ import annotations

import torch

from safecompile.doctor._program import Case, CountingBackend, fault, program

__all__ = ["run"]


@program("S6", "is_compiling() is True in the eager code of other threads", kind="silent", versions="2.13 and newer")
def run(case: Case) -> None:
    backend = CountingBackend(gated=True)
    with backend.compiling(case.compile(lambda x: x.sin(), backend=backend), torch.ones(3)):
        told = torch.compiler.is_compiling()
    if told:
        fault("a thread that compiles nothing was told that it is compiling")
