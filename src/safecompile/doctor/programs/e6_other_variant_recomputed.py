"""CheckpointError in backward: the recomputation runs another compiled variant than its forward.

Another thread has called the same compiled code with other shapes in between; the variant for all shapes that came of
it is looked up first, and saves other tensors than the one that the forward ran.
"""

from __future__ import annotations

import torch

from safecompile.doctor._program import Case, attempt, elsewhere, program

__all__ = ["run"]


@program(
    "E6",
    "checkpoint recomputes with another compiled variant than its forward",
    kind="error",
    upstream="pytorch#166926",
)
def run(case: Case) -> None:
    w = torch.linspace(-1, 1, 64).reshape(8, 8).requires_grad_()

    def block(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x @ w).view(-1)[: x.shape[0] * 4].sin().cos()

    call, x = case.compile(block, backend="aot_eager"), torch.ones(4, 8, requires_grad=True)
    call(x)
    loss = case.checkpoint(call, x).sum()
    elsewhere(lambda: [call(torch.ones(rows, 8, requires_grad=True)) for rows in (6, 7)])
    (want,) = torch.autograd.grad(block(x).sum(), x)
    attempt("the backward", lambda: torch.autograd.grad(loss, x)[0], want)
