"""Eight threads make the first call of one function: how often is it compiled?"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from safecompile import thread_safe_compile

THREADS = 8


def compiles(compile_function: Callable[..., Any]) -> int:
    graphs = []
    start = threading.Barrier(THREADS)

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    @compile_function(backend=backend)
    def polynomial(x: torch.Tensor) -> torch.Tensor:
        return x**3 + 2 * x**2 + 1

    def first_call() -> None:
        start.wait()
        polynomial(torch.ones(4))

    threads = [threading.Thread(target=first_call) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(graphs)


print("compiles by torch.compile:", compiles(torch.compile))
print("compiles by thread_safe_compile:", compiles(thread_safe_compile))
