"""InternalTorchDynamoError from a call whose argument, a dict or list, another thread changes during the compile.

It is a race of the program's own; with safecompile the error says which argument was changed while what was compiled.
"""

from __future__ import annotations

from typing import Any

import torch

from safecompile.doctor._program import Case, company, elsewhere, fault, first_line, program

__all__ = ["run"]


@program("E8", "an argument that another thread changes is an internal error", kind="error", upstream="pytorch#196208")
def run(case: Case) -> str | None:
    box, x = {"k": 3, "l": 4}, torch.ones(2)

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        elsewhere(box.clear)
        return graph.forward

    call = case.compile(lambda box, x: x * box["k"], backend=backend)
    try:
        with company():
            call(box, x)
    except Exception as error:
        if case.library and type(error).__name__ == "ArgumentChangedError":
            return "refused with ArgumentChangedError, which names the argument"
        fault(first_line(error))
    return None
