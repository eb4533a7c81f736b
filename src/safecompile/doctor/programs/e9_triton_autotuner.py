"""Two threads that launch one autotuned Triton kernel for the first time crash."""

from __future__ import annotations

from safecompile.doctor._program import Case, NotApplicableError, program

__all__ = ["run"]


@program(
    "E9",
    "a Triton autotuner shared by two threads fails at its first launch",
    kind="error",
    upstream="triton#11494",
    protected=False,
)
def run(case: Case) -> None:
    raise NotApplicableError("needs a GPU; not measured yet")
