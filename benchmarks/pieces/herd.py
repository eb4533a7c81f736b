"""P1: the first call of one function by several threads together."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

from benchmarks.pieces.variants import CountingBackend, compile_as, new_function, prepare, together


def herd(*, variant: str, backend: str, threads: Sequence[int], rounds: int) -> dict[str, Any]:
    """Measure until the last thread has its result: in each round once with each number of threads."""
    prepare(variant, backend)
    return {
        "rounds": [
            {str(count): _first_call(variant, backend, count) for count in random.sample(threads, len(threads))}
            for _ in range(rounds)
        ]
    }


def _first_call(variant: str, backend: str, threads: int) -> dict[str, Any]:
    import torch

    counting = CountingBackend(backend)
    function, x = compile_as(variant, new_function(1), backend=counting), torch.ones(8, 8)
    errors = [""] * threads

    def call(index: int) -> None:
        try:
            function(x)
        except Exception as error:
            errors[index] = f"{type(error).__name__}: {error}"

    cpu = cpu_seconds()
    began, ended = together(threads, call)
    return {
        "seconds": ended - began,
        "cpu_seconds": cpu_seconds() - cpu,
        "compiles": len(counting.shapes),
        "errors": [error for error in errors if error],
    }


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the C++ compilers it has run."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
