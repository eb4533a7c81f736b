"""Every module call raises NameError, for the rest of the process, after two FX traces have overlapped.

The one that began last puts back what it found, which is the other's patch of `nn.Module.__call__`.
"""

from __future__ import annotations

import threading

import torch

from safecompile.doctor._program import Case, Stops, attempt, example, fault, in_the_middle_of, program

__all__ = ["run"]


@program(
    "P1",
    "modules stay broken after two FX traces that overlap",
    kind="broken for good",
    upstream="pytorch#112775",
)
def run(case: Case) -> None:
    model, x, original = torch.nn.Linear(4, 4), example(), torch.nn.Module.__call__
    want, first, tracer = model(x), Stops(), []

    def trace(stops: Stops) -> torch.fx.GraphModule:
        tracer.append(threading.current_thread())
        return torch.fx.symbolic_trace(stops)

    def end_first() -> None:
        first.go_on.set()
        tracer[0].join()

    # The first trace ends while the second one is inside.
    in_the_middle_of(trace, first, lambda: in_the_middle_of(torch.fx.symbolic_trace, Stops(), end_first))
    attempt("model(x) afterwards", lambda: model(x), want)
    attempt("a compile afterwards", lambda: case.compile(lambda x: model(x), backend="eager")(x), want)
    if torch.nn.Module.__call__ is not original:
        fault("nn.Module.__call__ is not the original afterwards")
