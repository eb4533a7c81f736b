"""A setting is lost, or a compile dies of it: "Global … state changed while dynamo tracing".

A compile puts the deterministic, dtype and matmul settings of the process back to what they were when it began, or
refuses when another thread has changed them meanwhile, as loading a model often does.
"""

from __future__ import annotations

import torch

from safecompile.doctor._program import Case, CountingBackend, attempt, fault, program

__all__ = ["run"]


@program("S3", "a compile undoes settings that another thread makes, or dies of them", kind="silent")
def run(case: Case) -> None:
    backend = CountingBackend(gated=True)
    call = case.compile(lambda x: x.sin(), backend=backend)

    def set_during_a_compile() -> None:
        with backend.compiling(call, torch.ones(3)):
            torch.use_deterministic_algorithms(True)

    attempt("the compile", set_during_a_compile)
    if not torch.are_deterministic_algorithms_enabled():
        fault("use_deterministic_algorithms(True) of another thread was undone by a compile")
