"""P7: memory per callable and per thread."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import tracemalloc
from pathlib import Path
from typing import Any

from benchmarks.pieces.variants import compile_as, new_function, prepare


def memory(*, variant: str, backend: str, made: int, compiled: int, threads: int, traced: bool) -> dict[str, Any]:
    """Measure what is kept per callable when it is made, per callable once it is compiled, and per thread that calls one.

    ``traced`` asks tracemalloc, which sees what Python allocates, exactly; otherwise it is by how much the resident
    memory of the process grows, which also has what C++ keeps, to a few kilobytes, or nothing where the system does not
    tell. They are measured in different processes: tracemalloc takes memory of its own.
    """
    import torch

    prepare(variant, backend)
    if traced:
        tracemalloc.start()
    held = _traced if traced else _resident
    x, originals = torch.ones(8, 8), [new_function(1) for _ in range(made)]
    before = held()
    functions = [compile_as(variant, original, backend=backend) for original in originals]
    after_making = held()
    for function in functions[:compiled]:
        function(x)
    after_compiling = held()

    barrier, call = threading.Barrier(threads + 1), functions[0]

    def work() -> None:
        torch.ones(8, 8).sum()  # what torch keeps of every thread
        barrier.wait()
        barrier.wait()
        with _turn:
            call(x)
        barrier.wait()
        barrier.wait()

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    barrier.wait()
    started = held()
    barrier.wait()
    barrier.wait()
    called = held()
    barrier.wait()
    for worker in workers:
        worker.join()
    return {
        "made": (after_making - before) / made,
        "compiled": (after_compiling - after_making) / compiled,
        "thread": (called - started) / threads,
    }


def _traced() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def _resident() -> int:
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)  # give back what is free, in glibc
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.exists() else 0


_turn = threading.Lock()
