"""Measure the library against stock `torch.compile` and three cures by hand: ``python -m benchmarks.run [--quick]``.

Each measurement runs in a process of its own (see `pieces`), the variants in turn, and the tables give medians of ratios
within one repetition. What is measured:

    herd        P1: the first call of one function by several threads at once: wall time and number of compiles
    warm        P2: a call of what is compiled, through a function, a method and a module
    beside      P3: the longest and the 99th-percentile warm call while another thread compiles
    throughput  P4: warm calls of 1 to 8 threads
    load        P5: requests of several clients with a new shape now and then
    imports     P6: `import safecompile` after `import torch`
    memory      P7: memory per callable and per thread
    checkpoint  a stack of checkpointed blocks: time and memory in one thread, and four threads' throughput

The folder that ``--output`` names gets results.json and the plots. ``python -m benchmarks.figures FOLDER`` puts them into
the README and the docs.
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
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import plots, report
from benchmarks.pieces.load import EAGER
from benchmarks.pieces.variants import VARIANTS

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 900.0
SCHEMA = 1  # of the JSON: counted up when the meaning of what is there changes

Result = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    threads: tuple[int, ...] = (1, 2, 4, 8, 16)
    herd_repeats: int = 2
    herd_rounds: int = 2
    warm: tuple[int, int, int, int] = (4, 3, 500, 10)  # processes, rounds in each, calls, repeats
    beside_rounds: int = 2
    blocked_seconds: float = 2.0
    layers: int = 2
    throughput_threads: tuple[int, ...] = (1, 2, 4, 8)
    throughput_rounds: int = 100
    throughput_seconds: float = 0.1
    load: tuple[int, float, int, float] = (8, 25.0, 6, 2.0)  # clients, requests a second of each, shapes, interval
    import_repeats: int = 5
    memory: tuple[int, int, int] = (200, 4, 4)  # callables that are made, those of them that are compiled, threads
    checkpoint_steps: int = 60
    checkpoint_rounds: int = 60
    checkpoint_tokens: int = 256
    checkpoint_memory_tokens: int = 8192
    dropouts: tuple[float, ...] = (0.0, 0.1)


QUICK = Plan(
    threads=(1, 8),
    herd_repeats=1,
    herd_rounds=1,
    warm=(1, 2, 100, 5),
    beside_rounds=1,
    blocked_seconds=0.3,
    layers=1,
    throughput_threads=(1, 2),
    throughput_rounds=2,
    throughput_seconds=0.05,
    load=(2, 25.0, 2, 0.3),
    import_repeats=1,
    memory=(20, 1, 2),
    checkpoint_steps=3,
    checkpoint_rounds=2,
    checkpoint_tokens=16,
    checkpoint_memory_tokens=4096,
    dropouts=(0.1,),
)


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
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile the library's source again
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.pieces", piece, json.dumps(options)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{piece} {options} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return json.loads(done.stdout.splitlines()[-1])

    def each(self, piece: str, variants: Iterable[str], **options: Any) -> Result:
        return {variant: self.run(piece, variant=variant, **options) for variant in variants}

    def herd(self) -> Result:
        plan = self.plan
        options = {"backend": self.backend, "threads": plan.threads, "rounds": plan.herd_rounds}
        return {"repeats": [self.each("herd", order, **options) for order in _in_turn(VARIANTS, plan.herd_repeats)]}

    def warm(self) -> Result:
        processes, *sizes = self.plan.warm
        options = {"backend": self.backend, **dict(zip(("rounds", "calls", "repeats"), sizes, strict=True))}
        # In several processes: where one happens to have its code in memory moves the difference by 0.3 µs.
        return _together([self.run("warm", **options) for _ in range(processes)])

    def beside(self) -> Result:
        plan = self.plan
        options = {"backend": self.backend, "rounds": plan.beside_rounds, "seconds": plan.blocked_seconds}
        return {"nobody": self.run("alone", **options), **self.each("beside", VARIANTS, layers=plan.layers, **options)}

    def throughput(self) -> Result:
        plan = self.plan
        return self.run(
            "throughput",
            backend=self.backend,
            threads=plan.throughput_threads,
            rounds=plan.throughput_rounds,
            seconds=plan.throughput_seconds,
        )

    def load(self) -> Result:
        clients, rate, shapes, interval = self.plan.load
        options = {"backend": self.backend, "clients": clients, "rate": rate, "shapes": shapes, "interval": interval}
        return self.each("load", (*VARIANTS, EAGER), **options)

    def imports(self) -> Result:
        self.run("imports", safe=True)  # compiles the source to bytecode, as pip does when it installs
        runs = [
            {"safecompile" if safe else "torch": self.run("imports", safe=safe) for safe in order}
            for order in _in_turn((False, True), self.plan.import_repeats)
        ]
        return {"runs": runs}

    def memory(self) -> Result:
        made, compiled, threads = self.plan.memory
        options = {"backend": self.backend, "made": made, "compiled": compiled, "threads": threads}
        return {way: self.each("memory", VARIANTS, traced=way == "traced", **options) for way in ("traced", "resident")}

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
                str(p): self.each("checkpoint_memory", ("stock", "safecompile"), dropout=p, **large)
                for p in plan.dropouts
            },
            "threads": self.run("checkpoint_threads", threads=4, rounds=plan.checkpoint_rounds, steps=2, **size),
        }


def _in_turn(variants: Sequence[Any], times: int) -> Iterable[Sequence[Any]]:
    return [variants[:: -1 if index % 2 else 1] for index in range(times)]


def _together(results: Sequence[Any]) -> Any:
    """Put the lists of results of one shape after one another."""
    first = results[0]
    if isinstance(first, dict):
        return {name: _together([result[name] for result in results]) for name in first}
    return [one for result in results for one in result]


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
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "safecompile": version("safecompile"),
        "backend": backend,
        "load_before": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", choices=report.TABLES, help="measure this; may be given several times"
    )
    parser.add_argument("--quick", action="store_true", help="a short run: whether it works, no figures to quote")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write results.json and the plots to FOLDER")
    parser.add_argument("--backend", help="for torch.compile; by default inductor, or aot_eager without a C++ compiler")
    options = parser.parse_args(arguments)

    backend = options.backend or ("inductor" if cpp_compiler() else "aot_eager")
    plan, machine = QUICK if options.quick else Plan(), describe_machine(backend)
    print(", ".join(f"{name} {value}" for name, value in machine.items() if value is not None))
    if options.backend is None and backend == "aot_eager":
        print("No C++ compiler was found, which Inductor needs on the CPU: measured with aot_eager instead.")
    run = {"schema": SCHEMA, "machine": machine, "quick": options.quick, "plan": asdict(plan), "results": {}}
    with tempfile.TemporaryDirectory() as cache:
        bench = Bench(backend, plan, cache)
        for piece in report.TABLES:
            if not options.only or piece in options.only:
                run["results"][piece] = getattr(bench, piece)()
                print(f"\n{report.table(run, piece).text()}", flush=True)
    if not options.only:
        print(f"\n{report.targets(run).text()}")
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        text = json.dumps(run, indent=1) + "\n"
        (options.output / "results.json").write_text(text)
        plots.draw_all(json.loads(text), options.output)


if __name__ == "__main__":
    main()
