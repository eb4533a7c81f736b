"""A model that is called as it is returns a `torch.fx.Proxy` instead of a tensor.

`torch.fx.symbolic_trace` patches `nn.Module.__call__` for the whole process. While one thread traces, the calls of
another thread go into the tracer: they return proxies, and appear in the traced graph.
"""

from __future__ import annotations

import torch

from safecompile.doctor._program import Case, Stops, attempt, example, fault, in_the_middle_of, names, program

__all__ = ["run"]


@program("S4", "an eager call beside an FX trace returns a Proxy", kind="silent", upstream="pytorch#112775")
def run(case: Case) -> None:
    alone, x, model = names(torch.fx.symbolic_trace(Stops())), example(), Stops()
    want = model(x)
    call = lambda: attempt("model(x)", lambda: model(x), want)  # noqa: E731
    traced = in_the_middle_of(torch.fx.symbolic_trace, model, call)
    if names(traced) != alone:
        fault("the traced graph has another thread's calls in it")
