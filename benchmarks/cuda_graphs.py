"""Count wrong results and measure throughput of CUDA graphs among threads: ``python benchmarks/cuda_graphs.py [--quick]``.

Needs a GPU. Each case is a process of its own, since a failed recording can leave the device unusable:

    results     2, 4 and 8 threads call one function in mode "reduce-overhead", on streams of their own and on the default
                stream; every output, and in training every gradient, is compared with eager's. Each thread has graphs, or as many
                as the library lets have some. Torch alone stands beside; there the main thread records first, since it
                is the only one that can.
    throughput  calls a second of 4 threads with graphs, of 4 threads without, and of one thread with graphs
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from safecompile._patches.cuda_graphs import CudaGraphs

LIMIT = 240.0
ROWS, WIDTH, INPUTS = 128, 256, 8


@dataclass(frozen=True)
class Case:
    """What one process does."""

    library: bool
    threads: int
    calls: int
    training: bool = False
    own_streams: bool = True
    new_streams: bool = False
    """A stream of its own for each call, of the 32 that torch hands out in turn."""
    graphs: bool = True
    breaks: bool = False
    timed: bool = False
    each_thread: bool = True
    """Let each thread have graphs, also on a torch where it was not measured yet; else only where it was."""
    main_first: bool = False
    """The main thread records before the others begin, without which they fail at once on torch alone."""
    beside: str = ""
    """What one more thread does meanwhile: ``"synchronize"``, ``"empty_cache"`` or ``"matmul"``."""

    def __str__(self) -> str:
        who = "torch alone" if not self.library else "safecompile" if self.each_thread else "safecompile as it is"
        work = "training" if self.training else "forward"
        streams = "new streams" if self.new_streams else "own streams" if self.own_streams else "default stream"
        return f"{who}, {'graphs' if self.graphs else 'no graphs'}, {work}, {self.threads} threads, {streams}"


def function(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Compute a few layers, small enough for the launches to take most of the time."""
    hidden = torch.relu(x @ first)
    for _ in range(5):
        hidden = torch.sin(hidden @ second) + 0.5 * hidden + x
    return hidden


def with_breaks(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Compute in three graphs, the outputs of which have to live while others are replayed."""
    hidden = torch.relu(x @ first) + x
    torch._dynamo.graph_break()
    other = torch.tanh(hidden @ second)
    torch._dynamo.graph_break()
    return torch.sin(other @ first) + hidden


class Work:
    """One thread's weights and inputs, and what eager makes of them."""

    def __init__(self, case: Case, number: int, eager: Callable[..., torch.Tensor]) -> None:
        generator = torch.Generator("cuda").manual_seed(number)

        def random(rows: int) -> torch.Tensor:
            return torch.randn(rows, WIDTH, device="cuda", generator=generator)

        self._training = case.training
        self._weights = [(random(WIDTH) / WIDTH**0.5).requires_grad_(case.training) for _ in range(2)]
        self._inputs = [random(ROWS) for _ in range(INPUTS)]
        self._wants = [self.results(eager, turn) for turn in range(INPUTS)]
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.done, self.seconds = 0, 0.0

    def results(self, call: Callable[..., torch.Tensor], turn: int) -> list[torch.Tensor]:
        """Return the output, and in training the gradients of the weights."""
        output = call(self._inputs[turn % INPUTS], *self._weights)
        if not self._training:
            return [output]
        return [output.detach(), *torch.autograd.grad(output.square().sum(), self._weights)]

    def check(self, results: list[torch.Tensor], turn: int) -> None:
        """Count a call with any result that is further from eager's than rounding; waits for nothing."""
        pairs = zip(results, self._wants[turn % INPUTS], strict=True)
        near = [(got - want).abs().max() <= 0.01 * want.abs().max() for got, want in pairs]  # what is no number is not
        self.wrong += ~torch.stack(near).all()


def measure(case: Case) -> dict[str, Any]:
    """Let the threads make their calls; return counts and seconds."""
    warnings.simplefilter("ignore")
    from safecompile import thread_safe_compile
    from safecompile._patches import patches

    (point,) = (one for one in patches.points if isinstance(one, CudaGraphs))
    point.each_thread = point.each_thread or case.each_thread
    eager = with_breaks if case.breaks else function
    make: Any = thread_safe_compile if case.library else torch.compile
    call = make(eager, **({"mode": "reduce-overhead"} if case.graphs else {}))
    works = [Work(case, number, eager) for number in range(case.threads)]
    for turn in range(4 * case.main_first):
        works[0].results(call, turn)
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    replays, errors, first = _count_replays(), Counter[str](), ""
    together, over = threading.Barrier(case.threads), threading.Event()

    def note(error: Exception) -> None:
        nonlocal first
        first = first or traceback.format_exc()[-2000:]
        errors[f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"] += 1

    def one_call(work: Work, turn: int) -> None:
        results = work.results(call, turn)
        if not case.timed:
            work.check(results, turn)
        work.done += 1

    def calls(work: Work) -> None:
        stream = torch.cuda.Stream() if case.own_streams else torch.cuda.default_stream()
        with torch.cuda.stream(stream):
            together.wait()
            for turn in range(case.calls):
                if case.timed and turn == case.calls // 4:
                    stream.synchronize()
                    together.wait()
                    work.seconds = -time.perf_counter()
                try:
                    if case.new_streams:  # what the last call has begun is over
                        with torch.cuda.stream(torch.cuda.Stream()):
                            one_call(work, turn)
                            torch.cuda.current_stream().synchronize()
                    else:
                        one_call(work, turn)
                except Exception as error:
                    note(error)
                    if errors.total() > 20 * case.threads:
                        break
            stream.synchronize()
            work.seconds += time.perf_counter()

    def beside() -> None:
        matrix, widths = torch.randn(64, 1 << 14, device="cuda"), itertools.cycle(range(1 << 12, 1 << 14, 8))

        def matmul() -> torch.Tensor:  # of shapes for which cuBLAS adds up parts in its workspace
            columns = matrix[:, : next(widths)]
            return columns @ columns.T

        act: dict[str, Callable[[], object]] = {
            "synchronize": torch.cuda.synchronize,
            "empty_cache": torch.cuda.empty_cache,
            "matmul": matmul,
        }
        try:
            while not over.wait(0.0005):
                act[case.beside]()
        except Exception as error:
            note(error)

    threads = [threading.Thread(target=calls, args=[work]) for work in works]
    threads += [threading.Thread(target=beside)] if case.beside else []
    for thread in threads:
        thread.start()
    for thread in threads[: case.threads]:
        thread.join()
    over.set()
    timed = case.calls - case.calls // 4
    return {
        "calls": sum(work.done for work in works),
        "wrong": sum(int(work.wrong) for work in works),
        "errors": dict(errors),
        "first_error": first,
        "replays": replays[0],
        "per_second": sum(timed / work.seconds for work in works) if case.timed else None,
        "reserved_MiB": (torch.cuda.memory_reserved() - before) / 2**20,
    }


def _count_replays() -> list[int]:
    replays, replay = [0], torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        replays[0] += 1
        replay(graph)

    torch.cuda.CUDAGraph.replay = counted  # type: ignore[method-assign, assignment]
    return replays


def in_a_process(case: Case) -> dict[str, Any]:
    """Measure a case in a process of its own; a crash and a hang are errors."""
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired as error:
        return {"errors": {"no end": 1}, "first_error": str(error.stderr)[-2000:], **_NOTHING}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if lines:
        result: dict[str, Any] = json.loads(lines[-1])
        if done.returncode:
            result["errors"][f"exit status {done.returncode} at the end"] = 1
            result["first_error"] = result["first_error"] or done.stderr[-2000:]
        return result
    return {"errors": {f"exit status {done.returncode}": 1}, "first_error": done.stderr[-2000:], **_NOTHING}


_NOTHING = {"calls": 0, "wrong": 0, "replays": 0, "per_second": None, "reserved_MiB": 0.0}


def cases(calls: int, timed: int) -> tuple[list[Case], list[Case]]:
    """Return those that count results, and those that measure throughput."""
    results = [
        Case(library, threads, calls, training, own, each_thread=each, main_first=not library)
        for training in (False, True)
        for threads in (2, 4, 8)
        for own in (True, False)
        for library, each in ((True, True), (True, False), (False, False))
    ]
    throughput = [
        Case(True, threads, timed, training, graphs=graphs, timed=True)
        for training in (False, True)
        for threads, graphs in ((4, True), (4, False), (1, True), (1, False))
    ]
    return results, throughput


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a sixth of the calls")
    parser.add_argument("--only", choices=["results", "throughput"], help="measure one of the two")
    parser.add_argument("--at-once", type=int, default=4, help="processes that count results at the same time")
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        result = measure(Case(**json.loads(options.case)))
        sys.stdout.write(f"\n{json.dumps(result)}\n")
        return
    if not torch.cuda.is_available():
        raise SystemExit("this needs a GPU, and torch sees none.")
    results, throughput = cases(2000 // (6 if options.quick else 1), 4000 // (6 if options.quick else 1))
    measured = []
    groups = {"results": (results, options.at_once), "throughput": (throughput, 1)}
    for group, at_once in (groups[name] for name in groups if options.only in (None, name)):
        with ThreadPoolExecutor(at_once) as pool:
            for case, result in zip(group, pool.map(in_a_process, group), strict=True):
                measured.append({"case": asdict(case), **result})
                speed = f", {result['per_second']:,.0f} calls a second" if result["per_second"] else ""
                errors = sum(result["errors"].values())
                print(
                    f"{case}: {result['wrong']} wrong of {result['calls']}, {errors} errors, {result['replays']} replays"
                    f"{speed}, {result['reserved_MiB']:.0f} MiB",
                    flush=True,
                )
    device = torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, {device}")
    if options.json:
        found = {"torch": torch.__version__, "device": device, "python": sys.version.split()[0], "measured": measured}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
