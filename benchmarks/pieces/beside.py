"""P3: warm calls while another thread compiles another function."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.pieces.variants import Function, clock, compile_as, new_function, prepare


class BlockingBackend:
    """Wait without the interpreter lock, as a compiler in a process of its own does, then run the graph as it is."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.entered = self.left = 0.0

    def __call__(self, graph: Any, inputs: Sequence[Any]) -> Any:
        self.entered = clock()
        threading.Event().wait(self._seconds)
        self.left = clock()
        return graph.forward


def beside(*, variant: str, backend: str, rounds: int, seconds: float, layers: int) -> dict[str, Any]:
    """Call a compiled function without pause while another thread compiles: one that waits, and a real one."""
    import torch

    prepare(variant, backend)
    x = torch.ones(8, 8)
    function = compile_as(variant, new_function(1), backend=backend)
    function(x)
    blocked, compiled = [], []
    for _ in range(rounds):
        blocking = BlockingBackend(seconds)
        stamps, failed = _stamps(function, x, compile_as(variant, new_function(1), backend=blocking))
        during = [t for t in stamps if blocking.entered < t < blocking.left]
        # The call that was running when the compile began, and the one that was when it ended.
        first = max((t for t in stamps if t <= blocking.entered), default=stamps[0])
        last = min((t for t in stamps if t >= blocking.left), default=stamps[-1])
        blocked.append(_waits([first, *during, last], failed))
        compiled.append(_waits(*_stamps(function, x, compile_as(variant, new_function(layers), backend=backend))))
    return {"blocked": blocked, "compiled": compiled}


def alone(*, backend: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Call a compiled function without pause beside a thread that sleeps: how long the machine itself interrupts."""
    import torch

    prepare("stock", backend)
    function, x = compile_as("stock", new_function(1), backend=backend), torch.ones(8, 8)
    function(x)
    return {"nothing": [_waits(*_stamps(function, x, lambda _: time.sleep(seconds))) for _ in range(rounds)]}


def _stamps(function: Function, x: Any, cold: Function) -> tuple[list[float], int]:
    """Return the times between warm calls made while another thread calls `cold`, and how many calls failed."""
    errors: list[BaseException] = []

    def compile_it() -> None:
        try:
            cold(x)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=compile_it)
    failed = 0
    stamps = [clock()]
    thread.start()
    running = True
    while running:  # one call at least
        running = thread.is_alive()
        try:
            function(x)
        except Exception:
            failed += 1
        stamps.append(clock())
    thread.join()
    if errors:
        raise errors[0]
    return stamps, failed


def _waits(stamps: list[float], failed: int) -> dict[str, Any]:
    waits = [end - start for start, end in itertools.pairwise(stamps)]
    return {
        "longest": max(waits),
        "p99": statistics.quantiles(waits, n=100, method="inclusive")[-1] if len(waits) > 1 else waits[0],
        "calls": len(waits),
        "failed": failed,
        "seconds": stamps[-1] - stamps[0],
    }
