"""What each thread is doing, for the live display, the metrics and the plot of threads over time."""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from safecompile import statistics

COMPILES = "compiles"
WAITS_TO_COMPILE = "waits for a compile"


@dataclass
class ThreadState:
    """One thread's state.

    Attributes:
        state: what it does, in its own words.
        tokens: how many it has made or used.
        seconds: time it spent compiling and waiting, by state, from samples.
        since: when it began, by ``time.monotonic``.
        ended: when it ended.
    """

    state: str = "starts"
    tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    since: float = field(default_factory=time.monotonic)
    ended: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """Mean over its life."""
        return self.tokens / self._life

    @property
    def idle_share(self) -> float:
        """Share of its life that it waited; from samples, like `waited`."""
        return self.waited / self._life

    @property
    def waited(self) -> float:
        """Seconds spent waiting: for work, for room, for replicas, for another thread's compile."""
        return sum(s for state, s in self.seconds.items() if state.startswith("waits"))

    @property
    def _life(self) -> float:
        return max(1e-9, (self.ended or time.monotonic()) - self.since)


class Monitor:
    """The states of named threads. They say themselves what they do; what the compile lock knows comes on top in `sample`."""

    def __init__(self) -> None:
        self.threads: dict[str, ThreadState] = {}
        self._sampled = time.monotonic()

    def add(self, name: str) -> None:
        """Add a thread that is about to start."""
        self.threads[name] = ThreadState()

    def now(self, state: str) -> None:
        """Say what the calling thread does from now on; ``done`` is its last state."""
        own = self._own()
        own.state = state
        if state == "done":
            own.ended = time.monotonic()

    def count(self, tokens: int) -> None:
        """Add to the tokens of the calling thread."""
        self._own().tokens += tokens

    def sample(self) -> dict[str, str]:
        """Return each thread's present state, and count the time since the last sample as spent in it."""
        lock = statistics().lock
        compiling = {lock.owner: COMPILES} if lock.owner else {}
        waiting = {waiter.thread: WAITS_TO_COMPILE for waiter in lock.waiters}
        states = {name: thread.state for name, thread in self.threads.items()}
        states |= {name: state for name, state in (compiling | waiting).items() if name in states}
        now = time.monotonic()
        for name, state in states.items():
            thread = self.threads[name]
            passed = now - max(self._sampled, thread.since)  # it may have begun since the last sample
            thread.seconds[state] = thread.seconds.get(state, 0.0) + max(0.0, passed)
        self._sampled = now
        return states

    def _own(self) -> ThreadState:
        return self.threads[threading.current_thread().name]


def memory(devices: Iterable[torch.device]) -> dict[str, dict[str, int]]:
    """Return bytes by device: of each GPU what torch allocated, now and at most, and what it reserved for that; of the CPU the most
    that this process ever had resident.
    """
    # In kilobytes everywhere but on macOS.
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    found = {"cpu": {"peak_resident": resident}}
    for device in sorted({device for device in devices if device.type == "cuda"}, key=str):
        found[str(device)] = {
            "allocated": torch.cuda.memory_allocated(device),
            "peak_allocated": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
        }
    return found
