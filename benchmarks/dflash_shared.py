"""What the benchmarks of the example's training have in common: they import it before any module of the example."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo.utils
from torch import Tensor

import safecompile

VOCABULARY = 151_936


def stock(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Be `torch.compile` with the signature of `thread_safe_compile`."""
    return torch.compile(function, **options) if function else partial(torch.compile, **options)


if "--child=stock" in sys.argv:  # before the example decorates its functions
    safecompile.thread_safe_compile = stock  # type: ignore[assignment]
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "dflash"))

from config import Config  # noqa: E402  # from the example's folder
from pipeline import Crew, Stopped  # noqa: E402


def tokens(vocabulary: int = VOCABULARY) -> Tensor:
    """Return what sequences are drawn from: random ids."""
    return torch.randint(2, vocabulary, (1_000_000,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))


def config_of(length: int, **options: Any) -> Config:
    """Return the example's options for what is timed: each sequence of ``length`` random tokens is read once and used for one step."""
    return Config(
        target_dtype="bfloat16",
        autocast=True,
        answers="data",
        taps=None,
        layers=5,
        prompt_length=length // 2,
        response_length=length - length // 2,
        sequences=1,
        uses=1,
        batch=1,
        gamma=7.0,
        gradient="in_forward",
        optimizer="adamw",
        lr=6e-4,
        **options,
    )


def first_line(error: BaseException) -> str:
    """Return an error's type and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


# --- graphs


def graphs() -> dict[str, int]:
    """Return the graphs of each function that this process has compiled, by torch's own count."""
    return dict(Counter(str(m.co_name) for m in torch._dynamo.utils.get_compilation_metrics() if m.graph_node_count))


class Compiled(NamedTuple):
    function: str
    thread: str
    failed: str | None


class Compiles(deque[Any]):
    """Takes the place of torch's own list of compiles, which says neither the thread nor more than the last 64."""

    def __init__(self) -> None:
        super().__init__(maxlen=10_000)
        self.seen: list[Compiled] = []
        torch._dynamo.utils._compilation_metrics = self

    def append(self, metrics: Any) -> None:
        """Take note of a compile, in the thread that made it."""
        super().append(metrics)
        if metrics.graph_node_count or metrics.fail_type:
            name = f"{Path(metrics.co_filename or '').stem}.{metrics.co_name}"  # many a module has a `forward`
            self.seen.append(Compiled(name, threading.current_thread().name, metrics.fail_type))

    def by_device(self, devices: dict[str, str]) -> dict[str, dict[str, int]]:
        """Return the number of graphs of each function for the device of each thread."""
        found: dict[str, Counter[str]] = {}
        for function, thread, failed in list(self.seen):
            if not failed:
                found.setdefault(function, Counter())[devices.get(thread, thread)] += 1
        return {function: dict(counts) for function, counts in found.items()}

    def failures(self) -> dict[str, int]:
        """Return the number of compiles of each function that failed."""
        return dict(Counter(function for function, _, failed in list(self.seen) if failed))


# --- threads


class NotingCrew(Crew):
    """Takes note of every thread's error, not of the first one alone.

    Args:
        stops: see `Crew`.
        note: takes a thread's name and its error, in that thread.
        patience: seconds that the other threads may go on after the first error.
    """

    def __init__(
        self, stops: Iterable[Callable[[], None]], *, note: Callable[[str, BaseException], None], patience: float = 0.0
    ) -> None:
        super().__init__(stops)
        self._note = note
        self._patience = patience
        self._over = False
        self._failed_at: float | None = None

    def start(self, name: str, work: Callable[[], None]) -> None:
        def noted() -> None:
            try:
                work()
            except Stopped:
                raise
            except BaseException as error:
                self._note(name, error)
                self._failed_at = self._failed_at or time.monotonic()
                raise

        super().start(name, noted)

    def stop(self) -> None:
        if not self._patience:
            super().stop()

    def stop_all(self) -> None:
        """Ask all threads to end, whatever patience there was; nobody waits long for them then."""
        self._patience, self._over = 0.0, True
        self.stop()

    def wait(self, tick: Callable[[], None] = lambda: None) -> None:
        while not self._over and (running := self._running()):
            if self._failed_at is not None and time.monotonic() > self._failed_at + self._patience:
                return
            running[0].ended.wait(timeout=0.1)
            tick()

    def end(self, grace: float = 8.0) -> None:
        self._patience = 0.0
        super().end(grace)


# --- the process that starts others, and watches the GPUs


class Sample(NamedTuple):
    at: float
    busy: float
    memory: int


class Outcome(NamedTuple):
    """How a process ended.

    Attributes:
        began: when it was started.
        exit: its exit status; None if it was ended because its time was over.
        output: what it wrote, the end of it.
        samples: of each GPU that was watched, by number.
    """

    began: float
    exit: int | None
    output: str
    samples: dict[int, list[Sample]]


def in_a_process(command: Sequence[str], output: Path, limit: float, gpus: Sequence[int]) -> Outcome:
    """Run a command for at most ``limit`` seconds, and look at the GPUs meanwhile.

    What it writes goes to a file: the processes that Inductor compiles in would hold a pipe open after its end.
    """
    samples: dict[int, list[Sample]] = {gpu: [] for gpu in gpus}
    over = threading.Event()
    watcher = threading.Thread(target=watch, args=(samples, over))
    watcher.start()
    began = time.time()
    code: int | None = None
    try:
        with output.open("wb") as file:
            code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=limit, check=False).returncode
    except subprocess.TimeoutExpired:
        pass
    finally:
        over.set()
        watcher.join()
    return Outcome(began, code, output.read_text(errors="replace")[-40_000:], samples)


def watch(samples: dict[int, list[Sample]], over: threading.Event) -> None:
    """Look at GPUs five times a second."""
    while not over.wait(0.2):
        for gpu, seen in samples.items():
            seen.append(Sample(time.time(), torch.cuda.utilization(gpu) / 100, torch.cuda.device_memory_used(gpu)))


def busy(samples: Sequence[Sample], first: float, last: float) -> float | None:
    """Return the mean share of the time between two moments in which a GPU ran a kernel; None if nobody looked."""
    within = [sample.busy for sample in samples if first <= sample.at <= last]
    return sum(within) / len(within) if within else None
