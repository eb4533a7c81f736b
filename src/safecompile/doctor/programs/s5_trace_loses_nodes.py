"""A traced graph lacks nodes, or the trace fails, because another thread compiled meanwhile.

Both patch `nn.Module` for the whole process; the one that ends first takes the other's patches away.
"""

from __future__ import annotations

import torch

from safecompile.doctor._program import Case, Stops, attempt, example, fault, in_the_middle_of, names, program

__all__ = ["run"]


@program("S5", "a compile beside an FX trace strips the trace's patches", kind="silent")
def run(case: Case) -> None:
    alone, linear = names(torch.fx.symbolic_trace(Stops())), torch.nn.Linear(4, 4)
    x = example()
    want, call = linear(x), case.compile(lambda x: linear(x), backend="aot_eager")
    traced = in_the_middle_of(torch.fx.symbolic_trace, Stops(), lambda: attempt("the compile", lambda: call(x), want))
    got = names(traced)
    if got != alone:
        fault(f"the traced graph has the nodes {got} instead of {alone}")
