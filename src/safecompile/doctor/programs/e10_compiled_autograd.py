"""Backwards of other threads are compiled, fail, or stay compiled for good, beside a thread with compiled autograd.

Compiled autograd is switched on for the process. With safecompile one thread at a time may have it, and others are told.
"""

from __future__ import annotations

from typing import Any

import torch

from safecompile.doctor._program import Case, elsewhere, fault, first_line, program

__all__ = ["run"]


@program(
    "E10", "compiled autograd of one thread compiles the backwards of others", kind="error", upstream="pytorch#135298"
)
def run(case: Case) -> str | None:
    from torch._dynamo import compiled_autograd

    compiled = []

    def compiler(graph: Any) -> Any:
        compiled.append(graph)
        return torch.compile(graph, backend="eager")

    def backward() -> None:
        x = torch.ones(3, requires_grad=True)
        torch.autograd.backward(x.sin().sum())

    with compiled_autograd._enable(compiler):
        try:
            elsewhere(backward)
        except Exception as error:
            if case.library and type(error).__name__ == "ContextConflictError":
                return "refused with ContextConflictError, which names both threads"
            fault(first_line(error))
    if compiled:
        fault("a backward was compiled by the compiler of another thread")
    return None
