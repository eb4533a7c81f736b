"""What `run.py` measures, one function a piece; each runs in a process of its own: ``python pieces.py NAME OPTIONS``.

Options are keyword arguments as JSON; the last line of output is the result as JSON. Times are in seconds. The variants:
``stock`` is `torch.compile`, ``lock`` is `torch.compile` with one lock around every call, as people write it by hand, and
``safecompile`` is this library.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import statistics
import sys
import threading
import time
import timeit
from collections.abc import Callable, Sequence
from typing import Any

# torch and safecompile are imported where they are used: what importing them costs is one of the things measured.

clock = time.perf_counter
Function = Callable[..., Any]

_one_lock = threading.RLock()


def compile_as(variant: str, function: Function, backend: Any) -> Function:
    import torch

    import safecompile

    if variant == "safecompile":
        return safecompile.thread_safe_compile(function, backend=backend)
    compiled = torch.compile(function, backend=backend)
    if variant == "stock":
        return compiled

    @functools.wraps(function)
    def locked(*args: Any) -> Any:
        with _one_lock:
            return compiled(*args)

    return locked


def prepare(variant: str, backend: Any) -> None:
    """Install what the variant needs, and compile something else: starting Inductor up is not what is measured."""
    import torch

    import safecompile

    if variant == "safecompile":
        safecompile.install()
    compile_as(variant, new_function(1), backend)(torch.ones(8, 8))


def new_function(layers: int) -> Function:
    """Return a function that was never compiled before, nor its kernels: its constants are in no cache."""
    lines = [f"    x = torch.tanh(x @ x) * {random.uniform(1, 2)} + {random.uniform(1, 2)}" for _ in range(layers)]
    return _define("\n".join(["import torch", "def function(x):", *lines, "    return x"]))


def _define(source: str) -> Function:
    namespace: dict[str, Any] = {}
    exec(compile(source, __file__, "exec"), namespace)  # torch 2.8 wraps what is from no file in one code for all
    return namespace["function"]


class CountingBackend:
    """Another backend, counted: each call of it is one graph compiled."""

    def __init__(self, name: str) -> None:
        import torch

        self._compile: Any = torch._dynamo.lookup_backend(name)
        self.count = 0

    def __call__(self, graph: Any, inputs: Sequence[Any]) -> Any:
        self.count += 1  # under torch's compile lock
        return self._compile(graph, inputs)


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


def herd(*, variant: str, backend: str, threads: int) -> dict[str, Any]:
    """Let threads make the first call of one function together; measure until the last has its result."""
    import torch

    prepare(variant, backend)
    counting = CountingBackend(backend)
    function, x = compile_as(variant, new_function(1), counting), torch.ones(8, 8)
    started: list[tuple[float, float]] = []
    start = threading.Barrier(threads, action=lambda: started.append((clock(), cpu_seconds())))
    ended, errors = [0.0] * threads, [""] * threads

    def call(index: int) -> None:
        start.wait()
        try:
            function(x)
        except Exception as error:
            errors[index] = f"{type(error).__name__}: {error}"
        ended[index] = clock()

    workers = [threading.Thread(target=call, args=(index,)) for index in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    wall, cpu = started[0]
    return {
        "seconds": max(ended) - wall,
        "cpu_seconds": cpu_seconds() - cpu,
        "compiles": counting.count,
        "errors": [error for error in errors if error],
    }


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the C++ compilers it has run."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def subjects(backend: str) -> dict[str, tuple[Function, Function]]:
    """Return, by what is called, stock torch's and the library's callable.

    Each has code of its own: Dynamo's cache belongs to the code, and the second callable over the same code pays for a
    comparison of backends in every call.
    """
    import torch

    import safecompile

    def method() -> Function:
        return _define("def function(self, x): return x + 1")

    def module() -> torch.nn.Module:
        return type("Module", (torch.nn.Module,), {"forward": method()})()

    class Holder:
        stock = torch.compile(method(), backend=backend)
        safe = safecompile.thread_safe_compile(method(), backend=backend)

    holder, stock_module = Holder(), module()
    stock_module.compile(backend=backend)
    return {
        "function": (
            torch.compile(_define("def function(x): return x + 1"), backend=backend),
            safecompile.thread_safe_compile(_define("def function(x): return x + 1"), backend=backend),
        ),
        "method": (holder.stock, holder.safe),
        "nn.Module in place": (stock_module, safecompile.thread_safe_compile(module(), backend=backend)),
    }


def warm(*, backend: str, rounds: int, calls: int, repeats: int) -> dict[str, Any]:
    """Measure a warm call: stock without patches, the library's with, and stock's with, in turn.

    One block is the fastest of `repeats` runs of `calls` calls, in CPU time of the calling thread: a warm call waits
    for nothing, and what other programs take on a busy machine is not its cost.
    """
    import torch

    import safecompile

    x = torch.ones(1)
    pairs = subjects(backend)
    measured: dict[str, dict[str, list[float]]] = {
        name: {"stock": [], "safecompile": [], "stock_patched": []} for name in pairs
    }

    def block(function: Function) -> float:
        timer = timeit.Timer("function(x)", timer=time.thread_time, globals={"function": function, "x": x})
        timer.timeit(calls)  # the interpreter specialises changed code again
        return min(timer.repeat(repeats, calls)) / calls

    installing = []
    for stock, safe in pairs.values():
        stock(x)
        safe(x)
    for _ in range(rounds):
        names = random.sample(list(pairs), len(pairs))
        safecompile.uninstall()
        for name in names:
            measured[name]["stock"].append(block(pairs[name][0]))
        started = clock()
        safecompile.install()
        installing.append(clock() - started)
        for name in names:
            stock, safe = pairs[name]
            measured[name]["safecompile"].append(block(safe))
            measured[name]["stock_patched"].append(block(stock))
    safecompile.uninstall()
    return {"seconds_per_call": measured, "install_seconds": installing}


def beside(*, variant: str, backend: str, rounds: int, seconds: float, layers: int) -> dict[str, Any]:
    """Call a compiled function without pause while another thread compiles another function."""
    import torch

    prepare(variant, backend)
    x = torch.ones(8, 8)
    function = compile_as(variant, new_function(1), backend)
    function(x)
    blocked, compiled = [], []
    for _ in range(rounds):
        blocking = BlockingBackend(seconds)
        stamps, failed = _stamps(function, x, compile_as(variant, new_function(1), blocking))
        during = [t for t in stamps if blocking.entered < t < blocking.left]
        # The call that was running when the compile began, and the one that was when it ended.
        first = max((t for t in stamps if t <= blocking.entered), default=stamps[0])
        last = min((t for t in stamps if t >= blocking.left), default=stamps[-1])
        blocked.append(_waits([first, *during, last], failed))
        compiled.append(_waits(*_stamps(function, x, compile_as(variant, new_function(layers), backend))))
    return {"blocked": blocked, "compiled": compiled}


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


def imports(*, safe: bool) -> dict[str, float]:
    """Import torch, and the library after it."""
    started = clock()
    import torch  # noqa: F401

    imported = clock()
    if safe:
        import safecompile  # noqa: F401
    ended = clock()
    return {"total": ended - started, "safecompile": ended - imported}


def alone(*, backend: str, seconds: float) -> dict[str, Any]:
    """Call a compiled function without pause beside a thread that sleeps: how long the machine itself interrupts."""
    import torch

    prepare("stock", backend)
    function, x = compile_as("stock", new_function(1), backend), torch.ones(8, 8)
    function(x)
    return {"waits": _waits(*_stamps(function, x, lambda _: time.sleep(seconds)))}


class Blocks:
    """A stack of blocks, each in a checkpointed region."""

    def __init__(self, layers: int, width: int, tokens: int, dropout: float) -> None:
        import torch
        from torch import nn

        torch.set_num_threads(1)
        self._blocks = [
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Dropout(dropout),
                nn.Linear(4 * width, width),
            )
            for _ in range(layers)
        ]
        self._x = torch.randn(tokens, width, requires_grad=True)

    def step(self, variant: str) -> None:
        """Run forward and backward."""
        from torch.utils.checkpoint import checkpoint

        import safecompile

        x = self._x
        for block in self._blocks:
            if variant == "safecompile":
                x = x + safecompile.checkpoint(block, x)
            else:
                x = x + checkpoint(block, x, use_reentrant=False)
        x.square().mean().backward()


VARIANTS = ("stock", "safecompile")


def checkpoint_time(*, dropout: float, steps: int, layers: int, width: int, tokens: int) -> dict[str, Any]:
    """Measure steps of a stack of checkpointed blocks in one thread, in pairs, in CPU time of the thread."""
    blocks = Blocks(layers, width, tokens, dropout)
    measured: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for index in range(steps + 3):
        for variant in VARIANTS[:: -1 if index % 2 else 1]:
            started = time.thread_time()
            blocks.step(variant)
            if index >= 3:
                measured[variant].append(time.thread_time() - started)
    return measured


def checkpoint_memory(*, variant: str, dropout: float, layers: int, width: int, tokens: int) -> dict[str, Any]:
    """Measure how much the most memory that the process ever had grows in two steps, in bytes."""
    import ctypes
    import resource

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(-3, 64 * 1024)  # M_MMAP_THRESHOLD: give what is freed back at once, in glibc
    Blocks(1, 8, 8, dropout).step(variant)
    blocks = Blocks(layers, width, tokens, dropout)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):
        blocks.step(variant)
    return {"bytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024}


def checkpoint_threads(
    *, threads: int, rounds: int, steps: int, layers: int, width: int, tokens: int
) -> dict[str, Any]:
    """Let threads step through blocks that draw nothing; measure the wall time until the last has made its steps."""
    stacks = [Blocks(layers, width, tokens, 0.0) for _ in range(threads)]

    def together(variant: str) -> float:
        def work(blocks: Blocks) -> None:
            for _ in range(steps):
                blocks.step(variant)

        workers = [threading.Thread(target=work, args=(blocks,)) for blocks in stacks]
        started = clock()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return clock() - started

    measured: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for index in range(rounds + 1):
        for variant in VARIANTS[:: -1 if index % 2 else 1]:
            seconds = together(variant)
            if index:
                measured[variant].append(seconds)
    return measured


PIECES: dict[str, Callable[..., dict[str, Any]]] = {
    piece.__name__: piece
    for piece in (herd, warm, alone, beside, imports, checkpoint_time, checkpoint_memory, checkpoint_threads)
}

if __name__ == "__main__":
    print(json.dumps(PIECES[sys.argv[1]](**json.loads(sys.argv[2]))))
