"""P2: a call of the smallest compiled function, when it is compiled."""

from __future__ import annotations

import random
import time
import timeit
from typing import Any

from benchmarks.pieces.variants import VARIANTS, Function, clock, compile_as, define

WITH_PATCHES = ("safecompile", "stock_patched")  # stock_patched: stock's callable while the library is installed


def subjects(backend: str) -> dict[str, dict[str, Function]]:
    """Return, by what is called, the callable of each variant.

    Each has code of its own: Dynamo's cache belongs to the code, and the second callable over the same code pays for a
    comparison of backends in every call.
    """
    import torch

    import safecompile

    def module() -> torch.nn.Module:
        return type("Module", (torch.nn.Module,), {"forward": define("def function(self, x): return x + 1")})()

    # A class for each: Dynamo's guards look at it.
    holders = {
        variant: type(
            "Holder",
            (),
            {"method": compile_as(variant, define("def function(self, x): return x + 1"), backend=backend)},
        )()
        for variant in VARIANTS
    }
    stock_module = module()
    stock_module.compile(backend=backend)
    return {
        "function": {v: compile_as(v, define("def function(x): return x + 1"), backend=backend) for v in VARIANTS},
        "method": {variant: holder.method for variant, holder in holders.items()},
        "nn.Module": {
            "stock": stock_module,
            "safecompile": safecompile.thread_safe_compile(module(), backend=backend),
        },
    }


def warm(*, backend: str, rounds: int, calls: int, repeats: int) -> dict[str, Any]:
    """Measure a warm call in rounds: the variants without the library's patches in turn, and those with them.

    One block is the fastest of `repeats` runs of `calls` calls, in CPU time of the calling thread: a warm call waits
    for nothing, and what other programs take on a busy machine is not its cost.
    """
    import torch

    import safecompile

    x = torch.ones(1)
    measured: dict[str, dict[str, list[float]]] = {}
    functions: list[tuple[Function, list[float], bool]] = []
    for name, variants in subjects(backend).items():
        measured[name] = {variant: [] for variant in (*variants, "stock_patched")}
        for variant, function in {**variants, "stock_patched": variants["stock"]}.items():
            functions.append((function, measured[name][variant], variant in WITH_PATCHES))
            function(x)

    def block(function: Function) -> float:
        timer = timeit.Timer("function(x)", timer=time.thread_time, globals={"function": function, "x": x})
        timer.timeit(calls)  # the interpreter specialises changed code again
        return min(timer.repeat(repeats, calls)) / calls

    installing = []
    for _ in range(rounds):
        for patched in (False, True):
            safecompile.uninstall()
            if patched:
                began = clock()
                safecompile.install()
                installing.append(clock() - began)
            for function, seconds, needs_patches in random.sample(functions, len(functions)):
                if needs_patches is patched:
                    seconds.append(block(function))
    safecompile.uninstall()
    return {"seconds_per_call": measured, "install_seconds": installing}
