"""A compile never ends: its backend, or code that is traced, waits for a thread that itself compiles.

The thread waits for torch's compile lock, which the waiting compile holds. With safecompile that thread's call runs
eagerly, this once, with a warning that names both threads.
"""

from __future__ import annotations

import threading

import torch

from safecompile.doctor._program import Case, HangError, example, program

__all__ = ["run"]


@program("D1", "a backend that waits for a thread which compiles waits for ever", kind="hang")
def run(case: Case) -> None:
    x = example()
    case.compile(lambda x: x * 3, backend="eager")(x)  # imports all that a compile needs
    inner, begun, ended = case.compile(lambda x: x.sin(), backend="eager"), threading.Event(), threading.Event()

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        begun.set()
        helper = threading.Thread(target=inner, args=(x,), daemon=True)
        helper.start()
        helper.join()
        return graph.forward

    def compile_() -> None:
        case.compile(lambda x: x + 1, backend=backend)(x)
        ended.set()

    threading.Thread(target=compile_, daemon=True).start()
    begun.wait()
    if not ended.wait(case.patience):
        raise HangError(f"a compile waits for a thread that waits for it; given up after {case.patience:g} s")
