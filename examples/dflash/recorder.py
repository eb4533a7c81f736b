"""What a run says of itself: metrics while it trains, and the summary of training."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import train
from monitor import COMPILES, WAITS_TO_COMPILE, ThreadState, memory
from replica import Numbers
from safecompile import statistics

EVERY_SECONDS = 5.0
"""Between two lines about threads and memory."""


class Recorder:
    """Writes the metrics of a training run.

    Args:
        training: what to write about.
        write: takes a metric's kind and its values, in any thread.
        seconds: tells the seconds of training so far, those before a resume among them.
        every: seconds between two lines about threads and memory.
    """

    def __init__(
        self,
        training: train.Training,
        write: Callable[..., None],
        seconds: Callable[[], float],
        every: float = EVERY_SECONDS,
    ) -> None:
        self._training = training
        self._write = write
        self._seconds = seconds
        self._every = every
        self._states: dict[str, str] = {}
        self._written = time.monotonic()

    def step(self, step: int, numbers: Numbers) -> None:
        """Write about a step, with the numbers that training itself has; to be called in the first replica's thread."""
        training = self._training
        self._write(
            "step",
            step=step,
            **numbers,
            waiting=training.waiting,
            queues={f"drafter-{index}": len(queue) for index, queue in enumerate(training.queues)},
            tokens_per_second=round(training.tokens_per_second, 1),
        )

    def tick(self) -> dict[str, str]:
        """Write about threads that do something else now, and about all from time to time; return what they do, by name.

        To be called often, in one thread.
        """
        states = self._training.monitor.sample()
        seconds = round(self._seconds(), 2)
        for name, state in states.items():
            if self._states.get(name) != state:
                self._write("thread", seconds=seconds, thread=name, state=state)
        self._states = states
        if time.monotonic() - self._written >= self._every:
            self.rates()
        return states

    def rates(self, of_all: list[dict[str, Any]] | None = None) -> None:
        """Write about all threads, about memory and, on node 0 of several, about all nodes.

        Args:
            of_all: `train.Training.numbers` of all nodes; None for what they said in the last second.
        """
        self._written = time.monotonic()
        training = self._training
        now = {"step": training.step, "seconds": round(self._seconds(), 2)}
        threads = {name: _rates(thread) for name, thread in training.monitor.threads.items()}
        self._write("threads", **now, **threads)
        if training.nodes.writes and training.nodes.count > 1:
            numbers = of_all or [training.numbers(), *training.nodes.others().values()]
            rate = sum(each.get("tokens_per_second", 0.0) for each in numbers)
            by_node = {f"node-{rank}": each for rank, each in enumerate(numbers)}
            self._write("nodes", **now, tokens_per_second=round(rate, 1), **by_node)
        for device, sizes in memory(training.config.devices()).items():
            self._write("memory", **now, device=device, **sizes)


def summary(training: train.Training, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what is to be said of training when it is over.

    Args:
        training: is over, or as far as it came.
        steps: the metrics of all steps, those before a resume among them.
    """
    tenth = max(1, len(steps) // 10)

    def mean(name: str, lines: list[dict[str, Any]]) -> float | None:
        return sum(line[name] for line in lines) / len(lines) if lines else None

    return {
        "steps": training.step,
        "loss_first_tenth": mean("loss", steps[:tenth]),
        "loss_last_tenth": mean("loss", steps[-tenth:]),
        "eal_first_tenth": mean("eal", steps[:tenth]),
        "eal_last_tenth": mean("eal", steps[-tenth:]),
        "largest_difference_between_replicas": (
            None if training.crew.running() else train.largest_difference(training.drafters)
        ),
        "context_tokens": training.tokens,
        "context_tokens_per_second": round(training.tokens_per_second, 1),
        "seconds_waited_for_each_others_compiles": round(statistics().lock.waited_seconds, 1),
        "memory": memory(training.config.devices()),
        "threads": {
            name: {
                "tokens": thread.tokens,
                "tokens_per_second": round(thread.tokens_per_second, 1),
                "idle_share": round(thread.idle_share, 3),
                "seconds": {state: round(s, 1) for state, s in thread.seconds.items()},
            }
            for name, thread in training.monitor.threads.items()
        },
    }


def _rates(thread: ThreadState) -> dict[str, float]:
    return {
        "tokens": thread.tokens,
        "tokens_per_second": round(thread.tokens_per_second, 1),
        "idle_share": round(thread.idle_share, 3),
        "compile_seconds": round(thread.seconds.get(COMPILES, 0.0), 2),
        "wait_for_compile_seconds": round(thread.seconds.get(WAITS_TO_COMPILE, 0.0), 2),
    }
