"""Later shapes run eagerly without a word: threads use up one budget of recompiles together.

The limit (8) is one for each code object, over all threads, devices and replicas of a model.
"""

from __future__ import annotations

from functools import partial

import torch

from safecompile.doctor._program import Case, CountingBackend, fault, program, together

__all__ = ["run"]


@program(
    "S9",
    "threads use up one recompile budget: later shapes run eagerly",
    kind="silent",
    upstream="pytorch#177355",
)
def run(case: Case) -> None:
    backend = CountingBackend()
    call = case.compile(lambda x: x.sin() + 1, backend=backend, dynamic=False)

    def work(first: int) -> None:
        for size in range(first, first + 4):  # half the budget of one thread
            call(torch.ones(size))

    together(*(partial(work, first) for first in (10, 20, 30)))
    if backend.count < 12:
        fault(f"3 threads with 4 shapes each: {backend.count} compiles, {12 - backend.count} shapes ran eagerly")
