"""Measure the library against stock `torch.compile`: ``python benchmarks/run.py [--quick] [--json FILE] [--only PIECE]``.

Each measurement runs in a process of its own (see `pieces.py`), the variants in turn, and the table gives medians of
ratios within one repetition. What is measured:

    herd      the first call of one function by several threads at once: wall time and number of compiles
    warm      a call of what is compiled, through a function, a method and a module
    beside    the longest warm call while another thread compiles
    imports   `import safecompile` after `import torch`
    checkpoint  a stack of checkpointed blocks: time and memory in one thread, and four threads' throughput
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

PIECES = Path(__file__).with_name("pieces.py")
LIMIT = 900.0

Result = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    threads: tuple[int, ...] = (1, 2, 4, 8, 16)
    herd_repeats: int = 3
    warm: tuple[int, int, int] = (8, 500, 10)  # rounds, calls, repeats
    beside_rounds: int = 2
    blocked_seconds: float = 2.0
    layers: int = 2
    import_repeats: int = 5
    checkpoint_steps: int = 60
    checkpoint_rounds: int = 60
    checkpoint_tokens: int = 256
    checkpoint_memory_tokens: int = 8192
    dropouts: tuple[float, ...] = (0.0, 0.1)


QUICK = Plan((1, 4), 1, (2, 100, 5), 1, 0.3, 1, 1, 3, 2, 16, 4096, (0.1,))


@dataclass(frozen=True)
class Bench:
    """Runs pieces in processes of their own."""

    backend: str
    plan: Plan
    cache: str

    def run(self, piece: str, **options: Any) -> Result:
        print(f"  {piece} {options}", file=sys.stderr, flush=True)
        environment = {
            **os.environ,
            # No compile is taken from a cache, and nothing but the measured threads compiles. The folder is new and shared
            # for the precompiled C++ header alone, which takes seconds: every function has constants of its own.
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
            "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
            "TORCHINDUCTOR_CACHE_DIR": self.cache,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [sys.executable, str(PIECES), piece, json.dumps(options)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{piece} {options} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return json.loads(done.stdout.splitlines()[-1])

    def herd(self) -> Result:
        return {
            "runs": [
                {
                    "threads": threads,
                    **{v: self.run("herd", variant=v, backend=self.backend, threads=threads) for v in order},
                }
                for order in _in_turn(("stock", "safecompile"), self.plan.herd_repeats)
                for threads in self.plan.threads
            ]
        }

    def warm(self) -> Result:
        rounds, calls, repeats = self.plan.warm
        return self.run("warm", backend=self.backend, rounds=rounds, calls=calls, repeats=repeats)

    def beside(self) -> Result:
        options = {"backend": self.backend, "seconds": self.plan.blocked_seconds}
        return {
            "nobody": self.run("alone", **options),
            **{
                variant: self.run(
                    "beside", variant=variant, rounds=self.plan.beside_rounds, layers=self.plan.layers, **options
                )
                for variant in ("stock", "lock", "safecompile")
            },
        }

    def imports(self) -> Result:
        runs = [
            {"safecompile" if safe else "torch": self.run("imports", safe=safe) for safe in order}
            for order in _in_turn((False, True), self.plan.import_repeats)
        ]
        return {"runs": runs}

    def checkpoint(self) -> Result:
        plan = self.plan
        size = {"layers": 4, "width": 256, "tokens": plan.checkpoint_tokens}
        large = {"layers": 8, "width": 256, "tokens": plan.checkpoint_memory_tokens}
        return {
            "time": {
                str(p): self.run("checkpoint_time", dropout=p, steps=plan.checkpoint_steps, **size)
                for p in plan.dropouts
            },
            "memory": {
                str(p): {
                    v: self.run("checkpoint_memory", variant=v, dropout=p, **large) for v in ("stock", "safecompile")
                }
                for p in plan.dropouts
            },
            "threads": self.run("checkpoint_threads", threads=4, rounds=plan.checkpoint_rounds, steps=2, **size),
        }


def _in_turn(variants: Sequence[Any], times: int) -> Iterable[Sequence[Any]]:
    return [variants[:: -1 if index % 2 else 1] for index in range(times)]


def report_herd(result: Result) -> Iterable[str]:
    runs = result["runs"]
    yield "First call of one function by N threads together (x one: to one thread's own time in the same repetition)"
    half = f"{'':4}{{:>8}}{'x one':>7}{'graphs':>7}{'errors':>7}"
    yield f"  {'threads':>8}{half.format('stock')}{half.format('ours')}{'ours/stock':>14}"
    count = len({run["threads"] for run in runs})
    firsts = [runs[index - index % count] for index in range(len(runs))]
    for threads in sorted({run["threads"] for run in runs}):
        pairs = [(run, first) for run, first in zip(runs, firsts, strict=True) if run["threads"] == threads]
        row = f"  {threads:8}"
        for variant in ("stock", "safecompile"):
            seconds = median(run[variant]["seconds"] for run, _ in pairs)
            ratio = median(run[variant]["seconds"] / first[variant]["seconds"] for run, first in pairs)
            graphs = max(run[variant]["compiles"] for run, _ in pairs)
            errors = sum(len(run[variant]["errors"]) for run, _ in pairs)
            row += f"    {seconds:7.2f}s{ratio:7.2f}{graphs:7}{errors:7}"
        to_stock = median(run["safecompile"]["seconds"] / run["stock"]["seconds"] for run, _ in pairs)
        yield f"{row}    {to_stock:10.2f}"


def report_warm(result: Result) -> Iterable[str]:
    yield "A warm call of x + 1 (CPU time)"
    yield f"  {'through':20}{'stock':>10}{'ours':>10}{'ours/stock':>12}{'more':>10}{'patches alone':>15}"
    for name, measured in result["seconds_per_call"].items():
        stock = measured["stock"]
        more = median(ours - theirs for ours, theirs in zip(measured["safecompile"], stock, strict=True))
        yield (
            f"  {name:20}{median(stock) * 1e6:8.2f}us{median(measured['safecompile']) * 1e6:8.2f}us"
            f"{_ratio(measured['safecompile'], stock):12.3f}{more * 1e6:8.2f}us"
            f"{_ratio(measured['stock_patched'], stock):15.3f}"
        )
    yield f"  installing the patches, once a process: {median(result['install_seconds']):.2f} s"


def report_beside(result: Result) -> Iterable[str]:
    yield "Warm calls while another thread compiles (longest: of all rounds; 99 %: median of the rounds)"
    yield f"  {'compile':26}{'variant':14}{'longest':>10}{'99 %':>12}{'calls/s':>10}{'failed':>8}{'compile':>9}"
    alone = {"nothing": [result["nobody"]["waits"]]}
    cases = [("nothing", "stock", alone)]
    cases += [(case, v, result[v]) for case in ("blocked", "compiled") for v in ("stock", "lock", "safecompile")]
    names = {"nothing": "none: the machine itself", "blocked": "waits without the GIL", "compiled": "real"}
    for case, variant, rounds in cases:
        waits = rounds[case]
        calls, seconds = sum(w["calls"] for w in waits), sum(w["seconds"] for w in waits)
        yield (
            f"  {names[case]:26}{variant:14}{max(w['longest'] for w in waits) * 1e3:8.1f}ms"
            f"{median(w['p99'] for w in waits) * 1e3:10.2f}ms{calls / seconds:10.0f}"
            f"{sum(w['failed'] for w in waits):8}{seconds / len(waits):8.1f}s"
        )


def report_imports(result: Result) -> Iterable[str]:
    runs = result["runs"]
    torch = [run["torch"]["total"] for run in runs]
    ours = [run["safecompile"]["total"] for run in runs]
    extra = median(run["safecompile"]["safecompile"] for run in runs)
    yield "Imports"
    yield f"  torch {median(torch):.2f} s; safecompile after it {extra * 1e3:.1f} ms; both/torch {_ratio(ours, torch):.3f}"


def report_checkpoint(result: Result) -> Iterable[str]:
    yield "A stack of checkpointed blocks (ours/stock; the limits are those of a 95 % interval)"
    for p, measured in result["time"].items():
        average, margin = _mean_ratio(measured["safecompile"], measured["stock"])
        memory = {variant: run["bytes"] for variant, run in result["memory"][p].items()}
        yield (
            f"  one thread, dropout {p}: time {average:.3f}, at most {average + margin:.3f}; "
            f"memory {memory['safecompile'] / memory['stock']:.3f} of {memory['stock'] / 2**20:.0f} MiB"
        )
    threads = result["threads"]
    average, margin = _mean_ratio(threads["stock"], threads["safecompile"])
    yield f"  four threads without random numbers: throughput {average:.3f}, at least {average - margin:.3f}"


def _mean_ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return mean(ratios), 1.96 * stdev(ratios) / len(ratios) ** 0.5


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return median(one / other for one, other in zip(ours, theirs, strict=True))


REPORTS: dict[str, Callable[[Result], Iterable[str]]] = {
    "herd": report_herd,
    "warm": report_warm,
    "beside": report_beside,
    "imports": report_imports,
    "checkpoint": report_checkpoint,
}


def cpp_compiler() -> str | None:
    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


def describe_machine(backend: str) -> Result:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": cores,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "safecompile": version("safecompile"),
        "backend": backend,
        "load_before": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=REPORTS, help="measure this; may be given several times")
    parser.add_argument("--quick", action="store_true", help="a short run: whether it works, no figures to quote")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement to FILE")
    parser.add_argument("--backend", help="for torch.compile; by default inductor, or aot_eager without a C++ compiler")
    options = parser.parse_args(arguments)

    backend = options.backend or ("inductor" if cpp_compiler() else "aot_eager")
    machine = describe_machine(backend)
    print(", ".join(f"{name} {value}" for name, value in machine.items() if value is not None))
    if options.backend is None and backend == "aot_eager":
        print("No C++ compiler was found, which Inductor needs on the CPU: measured with aot_eager instead.")
    results: Result = {}
    with tempfile.TemporaryDirectory() as cache:
        bench = Bench(backend, QUICK if options.quick else Plan(), cache)
        for piece, report in REPORTS.items():
            if not options.only or piece in options.only:
                results[piece] = getattr(bench, piece)()
                print("\n" + "\n".join(report(results[piece])), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
