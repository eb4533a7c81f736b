"""CheckpointError in a backward on a thread with another number of intra-op threads.

That number belongs to the thread, and compiled code is compiled for it: the recomputation on such a thread compiles a
variant of its own, which may save other tensors than the forward's.
"""

from __future__ import annotations

import torch

from safecompile.doctor._program import Case, attempt, elsewhere, program

__all__ = ["run"]


@program(
    "E7",
    "checkpoint fails in a backward on a thread with another thread count",
    kind="error",
    upstream="anemoi-core#1330",
)
def run(case: Case) -> None:
    w = torch.linspace(-1, 1, 64).reshape(8, 8).requires_grad_()

    def block(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x @ w).view(-1)[: x.shape[0] * 4].sin().cos()

    def backward() -> torch.Tensor:
        torch.set_num_threads(torch.get_num_threads() + 2)
        return torch.autograd.grad(loss, x)[0]

    call, x = case.compile(block, backend="aot_eager"), torch.ones(4, 8, requires_grad=True)
    for rows in (4, 6):
        call(torch.ones(rows, 8, requires_grad=True))
    loss = case.checkpoint(call, x).sum()
    (want,) = torch.autograd.grad(block(x).sum(), x)
    attempt("the backward", lambda: elsewhere(backward), want)
