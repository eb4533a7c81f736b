"""Traces, exports and loads of programs fail beside each other.

"CURRENT_PATCHER is None in finally block", "Trying to pop empty mode stack", "Duplicate pattern": what they note down
while they work is the process's.
"""

from __future__ import annotations

import io

import torch

from safecompile.doctor._program import Case, attempt, example, program, repeat, together

__all__ = ["run"]


@program("E3", "traces, exports and loads fail beside each other", kind="error", upstream="pytorch#168042")
def run(case: Case) -> str:
    model, saved = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), io.BytesIO()
    torch.export.save(torch.export.export(model, (example(),)), saved)

    def load() -> None:
        for _ in range(5):
            attempt("torch.export.load", lambda: torch.export.load(io.BytesIO(saved.getvalue())))

    return repeat(4, lambda: together(load, load, load, load))
