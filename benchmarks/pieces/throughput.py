"""P4: how many warm calls several threads make together."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.pieces.variants import VARIANTS, Function, clock, compile_as, define

# Most of the time of a call is spent in kernels, as that of a small model, and a part without the interpreter lock.
SOURCE = "import torch\ndef function(x):\n    for _ in range(4):\n        x = torch.tanh(x @ x) + x\n    return x"
SIZE = 128


def throughput(*, backend: str, threads: Sequence[int], rounds: int, seconds: float) -> dict[str, Any]:
    """Count the calls of one function by all threads in a fixed time, the variants in turn.

    Returns, by number of threads and variant, the calls per second of each round.
    """
    import torch

    import safecompile

    torch.set_num_threads(1)  # before other threads start, which take it from here
    workers = [ThreadPoolExecutor(1) for _ in range(max(threads))]
    x = torch.rand(SIZE, SIZE) / SIZE
    functions = {variant: compile_as(variant, define(SOURCE), backend=backend) for variant in VARIANTS}
    measured: dict[str, dict[str, list[float]]] = {str(n): {variant: [] for variant in VARIANTS} for n in threads}
    for index in range(rounds):
        # First those that need no patches and then the library, in the next round the other way round: a machine that
        # gets slower or faster meanwhile does so for both.
        for patched in (False, True) if index % 2 else (True, False):
            safecompile.uninstall()
            if patched:
                safecompile.install()
            variants = [variant for variant in VARIANTS if (variant == "safecompile") is patched]
            # Not measured: the interpreter specialises changed code again, in the calls right after the change.
            for variant in variants:
                _calls_per_second(functions[variant], x, workers, seconds)
            for variant in random.sample(variants, len(variants)):
                for count in random.sample(threads, len(threads)):
                    rate = _calls_per_second(functions[variant], x, workers[:count], seconds)
                    measured[str(count)][variant].append(rate)
    safecompile.uninstall()
    for worker in workers:
        worker.shutdown()
    return {"calls_per_second": measured}


def _calls_per_second(function: Function, x: Any, pools: Sequence[ThreadPoolExecutor], seconds: float) -> float:
    begin, calls, spans = threading.Barrier(len(pools)), [0] * len(pools), [(0.0, 0.0)] * len(pools)

    def work(index: int) -> None:
        function(x)  # in the first round, a copy of the thread's own is compiled here
        begin.wait()
        began = now = clock()
        while now < began + seconds:
            function(x)
            calls[index] += 1
            now = clock()
        spans[index] = began, now

    for future in [pool.submit(work, index) for index, pool in enumerate(pools)]:
        future.result()
    return sum(calls) / (max(end for _, end in spans) - min(begin for begin, _ in spans))
