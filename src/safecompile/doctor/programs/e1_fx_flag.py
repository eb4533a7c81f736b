"""RuntimeError: "Detected that you are using FX to symbolically trace a dynamo-optimized function".

Raised by calls of compiled functions, warm ones too, while another thread traces something else: whether somebody
traces is one flag for the process.
"""

from __future__ import annotations

import torch

from safecompile.doctor._program import Case, Stops, attempt, example, in_the_middle_of, program

__all__ = ["run"]


@program(
    "E1",
    "a compiled call beside a trace of another thread is refused",
    kind="error",
    upstream="pytorch#126024",
    versions="up to 2.13",
)
def run(case: Case) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    x = example()
    call = case.compile(lambda x: x.sin() + 1, backend="eager", fullgraph=True)
    call(x)
    warm = lambda: attempt("a warm call beside make_fx", lambda: call(x), x.sin() + 1)  # noqa: E731
    in_the_middle_of(lambda model: make_fx(model)(x), Stops(), warm)
    cold = lambda: attempt(  # noqa: E731
        "a first call beside symbolic_trace", lambda: case.compile(lambda x: x.cos(), backend="eager")(x), x.cos()
    )
    in_the_middle_of(torch.fx.symbolic_trace, Stops(), cold)
