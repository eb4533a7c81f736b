"""NameError: "module is not installed as a submodule", from a model that nobody traces.

It was called while another thread was inside `torch.fx.symbolic_trace`, which patches module calls for all threads.
"""

from __future__ import annotations

import torch

from safecompile.doctor._program import Case, Stops, attempt, example, in_the_middle_of, program

__all__ = ["run"]


@program("E2", "an eager model called beside an FX trace of another fails", kind="error")
def run(case: Case) -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), example()
    want = model(x)
    call = lambda: attempt("model(x)", lambda: model(x), want)  # noqa: E731
    in_the_middle_of(torch.fx.symbolic_trace, Stops(), call)
