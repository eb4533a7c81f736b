"""RuntimeError: "Metric(s) {'is_forward'} have already been set", from the first backwards of several threads.

A backward is compiled when it is first called; torch 2.8 keeps the times of such compiles in one place for all.
"""

from __future__ import annotations

from functools import partial

import torch

from safecompile.doctor._program import Case, attempt, fresh, program, repeat, together

__all__ = ["run"]


@program("E5", "first backwards of several threads fail", kind="error", upstream="pytorch#170605", versions="2.8")
def run(case: Case) -> str:
    numbers = iter(range(1000))

    def once() -> None:
        losses = []
        for _ in range(6):
            x = torch.ones(3, requires_grad=True)
            losses.append(case.compile(fresh(next(numbers)), backend="aot_eager")(x).sum())
        together(*(partial(attempt, "a first backward", loss.backward) for loss in losses))

    return repeat(5, once)
