"""Outputs are overwritten: CUDA graphs are called from other threads than the one that recorded them.

`mode="reduce-overhead"` and `mode="max-autotune"` record CUDA graphs; threads that replay one share its memory.
"""

from __future__ import annotations

from safecompile.doctor._program import Case, NotApplicableError, program

__all__ = ["run"]


@program(
    "S8",
    "CUDA graphs called from another thread give wrong numbers",
    kind="silent",
    upstream="pytorch#123177",
    protected=False,
)
def run(case: Case) -> None:
    raise NotApplicableError("needs a GPU; not measured yet")
