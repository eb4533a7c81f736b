"""Outputs are overwritten: CUDA graphs are called from other threads than the one that recorded them.

`mode="reduce-overhead"` and `mode="max-autotune"` record CUDA graphs; threads that replay one share its memory.
"""

from __future__ import annotations

import torch

from safecompile.doctor._program import Case, fault, first_line, program, together

__all__ = ["run"]

_CALLS = 50


@program(
    "S8",
    "CUDA graphs called from several threads give wrong numbers",
    kind="silent",
    upstream="pytorch#123177",
    needs="gpu",
)
def run(case: Case) -> str:
    call = case.compile(lambda x: (x @ x).sin() + 1, mode="reduce-overhead")
    inputs = [torch.full((64, 64), float(number), device="cuda") / 64 for number in range(1, 5)]
    wants = [(x @ x).sin() + 1 for x in inputs]
    for x in inputs * 2:
        call(x).clone()  # warm, and recorded
    torch.cuda.synchronize()
    wrong: list[int] = []

    def calls(number: int) -> None:
        for _ in range(_CALLS):
            got = call(inputs[number]).clone()
            if not torch.allclose(got, wants[number], atol=1e-3):
                wrong.append(number)

    try:
        together(*(lambda number=number: calls(number) for number in range(len(inputs))))
    except Exception as error:
        fault(first_line(error))
    if wrong:
        fault(f"{len(wrong)} of {_CALLS * len(inputs)} results are other numbers")
    return f"{_CALLS * len(inputs)} of {_CALLS * len(inputs)} results"
