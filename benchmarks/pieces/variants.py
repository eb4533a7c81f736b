"""The ways to call compiled code from several threads that are measured against each other, and what they compile.

``stock``: `torch.compile` alone.
``lock``: one lock around every call of whatever is compiled.
``first_call``: each function has a flag and a lock: its first call is made by one thread, and all later ones are stock's.
``copies``: each thread compiles a copy of its own, code included, because Dynamo's cache belongs to the code.
``safecompile``: this library.
"""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

Function = Callable[..., Any]

VARIANTS = ("stock", "lock", "first_call", "copies", "safecompile")

clock = time.perf_counter
_one_lock = threading.RLock()


def compile_as(variant: str, function: Function, **options: Any) -> Function:
    """Compile a function; ``options`` are `torch.compile`'s."""
    import torch

    import safecompile

    if variant == "safecompile":
        return safecompile.thread_safe_compile(function, **options)
    if variant == "copies":
        return _copies(function, options)
    compiled = torch.compile(function, **options)
    return {"stock": lambda compiled: compiled, "lock": _locked, "first_call": _flagged}[variant](compiled)


def _locked(compiled: Function) -> Function:
    @functools.wraps(compiled)
    def call(*args: Any) -> Any:
        with _one_lock:
            return compiled(*args)

    return call


def _flagged(compiled: Function) -> Function:
    lock, called = threading.Lock(), False

    @functools.wraps(compiled)
    def call(*args: Any) -> Any:
        nonlocal called
        if not called:
            with lock:
                if not called:
                    result = compiled(*args)
                    called = True
                    return result
        return compiled(*args)

    return call


def _copies(function: Any, options: dict[str, Any]) -> Function:
    import torch

    mine = threading.local()

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        try:
            compiled = mine.compiled
        except AttributeError:
            copy = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
            compiled = mine.compiled = torch.compile(copy, **options)
        return compiled(*args)

    return call


def prepare(variant: str, backend: str) -> None:
    """Install what the variant needs, and compile something else: starting Inductor up is not what is measured."""
    import torch

    import safecompile

    safecompile.uninstall()
    if variant == "safecompile":
        safecompile.install()
    compile_as(variant, new_function(1), backend=backend)(torch.ones(8, 8))


def new_function(layers: int) -> Function:
    """Return a function that was never compiled before, nor its kernels: its constants are in no cache."""
    lines = [f"    x = torch.tanh(x @ x) * {random.uniform(1, 2)} + {random.uniform(1, 2)}" for _ in range(layers)]
    return define("\n".join(["import torch", "def function(x):", *lines, "    return x"]))


def define(source: str) -> Function:
    namespace: dict[str, Any] = {}
    exec(compile(source, __file__, "exec"), namespace)  # torch 2.8 wraps what is from no file in one code for all
    return namespace["function"]


class CountingBackend:
    """Another backend, which notes the shape that each graph was compiled for."""

    def __init__(self, name: str) -> None:
        import torch

        self._compile: Any = torch._dynamo.lookup_backend(name)
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, graph: Any, inputs: Sequence[Any]) -> Any:
        compiled = self._compile(graph, inputs)
        self.shapes.append(tuple(inputs[0].shape))  # under torch's compile lock
        return compiled


def together(threads: int, work: Callable[[int], None]) -> tuple[float, float]:
    """Let threads begin ``work(index)`` at the same time; return when they began, and when the last had ended."""
    began: list[float] = []
    start = threading.Barrier(threads, action=lambda: began.append(clock()))
    ended = [0.0] * threads
    errors: list[BaseException] = []

    def run(index: int) -> None:
        start.wait()
        try:
            work(index)
        except BaseException as error:
            errors.append(error)
        ended[index] = clock()

    workers = [threading.Thread(target=run, args=(index,)) for index in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return began[0], max(ended)
