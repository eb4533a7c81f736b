"""A training run: target threads make work, drafter threads learn from it in step with each other."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from cache import Cache
from checkpoints import Snapshot
from config import Config
from data import Source
from drafter import Drafter, new_drafter
from evaluator import Evaluator
from monitor import Monitor
from nodes import ALONE, Nodes
from pipeline import Crew, OrderedQueue, Tickets
from replica import GradientExchange, Numbers, Replica, Report
from safecompile import statistics
from target import Target
from work import Work, make_work, produce, read


class Training:
    """A training run: replicas, queues and threads.

    Attributes:
        compiled: graphs that all threads together compiled in it.

    Args:
        config: validated options.
        source: what sequences are drawn from.
        targets: one for each target thread.
        snapshot: to go on from; None for an untrained drafter.
        cache: of the targets' work, which they then do not make: only the first of them is looked at.
        evaluator: measures the weights while training goes on; it changes nothing in them.
        nodes: this node and the others that train with it.
    """

    def __init__(
        self,
        config: Config,
        source: Source,
        targets: list[Target],
        snapshot: Snapshot | None = None,
        cache: Cache | None = None,
        evaluator: Evaluator | None = None,
        nodes: Nodes = ALONE,
    ) -> None:
        self.config = config
        self.source = source
        self.nodes = nodes
        self.targets = targets
        self.cache = cache
        self._evaluator = evaluator
        self._first_item = snapshot.step // config.uses if snapshot else 0
        self.queues: list[OrderedQueue[Work]] = [
            OrderedQueue(config.queue_depth, self._first_item) for _ in range(config.drafters)
        ]
        self.monitor = Monitor()
        self.compiled = 0
        self._started: float | None = None
        self._ended: float | None = None
        self.replicas = [
            Replica(
                config,
                index,
                new_drafter(config, targets[0].shape, len(targets[0].taps), device),
                targets[0].vocabulary(device),
                targets[0].language.mask_id,
                nodes,
            )
            for index, device in enumerate(config.devices()[config.targets :])
        ]
        if snapshot:
            for replica in self.replicas:
                replica.restore(snapshot)
        self._exchange = GradientExchange(config.drafters, nodes)
        stops = [self._exchange.stop, *(queue.stop for queue in self.queues)]
        self.crew = Crew(stops if evaluator is None else [*stops, evaluator.stop])

    def run(self, report: Report, tick: Callable[[], None] = lambda: None) -> None:
        """Train ``config.drafters`` replicas on work from the targets, each in a thread of its own.

        However it ends, replicas whose threads have ended are all at the end of the same step, unless an update failed.

        Args:
            report: called in the first replica's thread after each of its steps.
            tick: called about ten times a second in this thread.

        Raises:
            WorkerError: if a thread failed; all have been told to stop by then.
        """
        config, nodes = self.config, self.nodes
        if self.step == config.steps:
            return
        items = range(self._first_item, -(-config.steps // config.uses))
        tickets = Tickets(itertools.product(items, range(config.drafters)))
        self._started = time.monotonic()
        compiled = statistics().compiled
        try:  # around the starts, too: an interrupt between two of them has to end those that run
            if self.cache is None:
                for index, target in enumerate(self.targets):
                    work = partial(produce, config, self.source, target, tickets, self.queues, self.monitor, nodes)
                    self._start(f"target-{index}", work)
            else:
                for index, queue in enumerate(self.queues):
                    work = partial(read, config, self.cache, index, items, queue, self.monitor, nodes)
                    self._start(f"reader-{index}", work)
            if self._evaluator:
                self._start("evaluation", partial(self._evaluator.run, self.monitor))
            self._start("drafter-0", partial(self._train_first, report))
            for replica in self.replicas[1:]:
                work = partial(replica.run, self.queues[replica.index], self._exchange, _silent, self.monitor)
                self._start(f"drafter-{replica.index}", work)
            self.crew.wait(tick)
        finally:
            self.crew.end()
            self._ended = time.monotonic()
            self.compiled = statistics().compiled - compiled
        self.crew.check()

    def doing(self) -> str:
        """Return what the threads do, for other nodes."""
        threads = ", ".join(f"{name} {thread.state}" for name, thread in list(self.monitor.threads.items()))
        return f"has made {self.step} steps: {threads}"

    def numbers(self) -> dict[str, Any]:
        """Return what other nodes may know, in JSON's types."""
        losses = self.replicas[0].losses
        return {
            "step": self.step,
            "loss": losses[-1] if losses else None,
            "tokens": self.tokens,
            "tokens_per_second": round(self.tokens_per_second, 1),
            "waiting": self.waiting,
        }

    @property
    def step(self) -> int:
        """Steps that the first replica has behind it, those before a resume among them."""
        return self.replicas[0].step

    @property
    def seconds(self) -> float:
        """Wall time of `run` so far."""
        return 0.0 if self._started is None else (self._ended or time.monotonic()) - self._started

    @property
    def waiting(self) -> int:
        """Batches of work in the queues."""
        return sum(map(len, self.queues))

    @property
    def drafters(self) -> list[Drafter]:
        """The replicas' models, which are equal between steps."""
        return [replica.drafter for replica in self.replicas]

    @property
    def losses(self) -> list[float]:
        """Mean loss of the replicas at each step that all have made since the start or the resume."""
        return [sum(same) / len(same) for same in zip(*(r.losses for r in self.replicas), strict=False)]

    @property
    def tokens(self) -> int:
        """Context tokens used since the start or the resume, of all replicas."""
        return sum(len(r.losses) for r in self.replicas) * self.config.batch * self.config.length

    @property
    def tokens_per_second(self) -> float:
        """Context tokens that all replicas used in a second, until the last of them ended: an evaluation may go on after that."""
        if self._started is None:
            return 0.0
        now = self._ended or time.monotonic()
        # A copy: other threads ask while this one adds threads.
        threads = [t for name, t in list(self.monitor.threads.items()) if name.startswith("drafter")]
        return self.tokens / max(1e-9, max((t.ended or now for t in threads), default=now) - self._started)

    def at_rest(self) -> Replica | None:
        """Return a replica whose weights are those after a whole step, and stay so: to be called before or after `run` only.

        Its thread may have been left behind, inside a compile or a pass, but cannot come to an update any more.
        """
        return next((r for r in self.replicas if r.whole), None)

    def _train_first(self, report: Report) -> None:
        """Be the first replica's thread, which reports, and hands its weights over to be evaluated."""
        replica, evaluator = self.replicas[0], self._evaluator

        def tell(step: int, numbers: Numbers) -> None:
            report(step, numbers)
            if evaluator and evaluator.is_due(replica.step):
                evaluator.offer(replica.step, replica.drafter)

        # The evaluation of the step that a run is resumed at may have been lost with what came after it.
        if evaluator and evaluator.is_due(replica.step):
            evaluator.offer(replica.step, replica.drafter)
        replica.run(self.queues[0], self._exchange, tell, self.monitor)
        if evaluator:
            evaluator.close()

    def _start(self, name: str, work: Callable[[], None]) -> None:
        def run() -> None:
            self.monitor.now("starts")
            try:
                work()
            finally:
                self.monitor.now("done")

        self.monitor.add(name)
        self.crew.start(name, run)


def compiles_of_one_thread(config: Config, source: Source, target: Target, cache: Cache | None = None) -> int:
    """Return how many graphs this thread alone compiles, from nothing, for two steps of all replicas, the shapes of a whole run.

    All compiled code of the process is thrown away first. One batch of work serves all replicas. Comparable with the threads'
    number only where those are on one device: on several, each compiles for itself.
    """
    torch.compiler.reset()
    before = statistics().compiled
    vocabulary = target.vocabulary(target.device)
    work = make_work(config, source, target, 0, 0) if cache is None else Work(*cache.read(0)).sent(target.device)
    for index in range(config.drafters):
        drafter = new_drafter(config, target.shape, len(target.taps), target.device)
        replica = Replica(config, index, drafter, vocabulary, target.language.mask_id)
        for step in range(2):
            replica.make_step(work, step)
        del drafter, replica  # before the next one takes as much memory for weights, gradients and optimizer
    return statistics().compiled - before


@torch.no_grad()
def largest_difference(drafters: list[Drafter]) -> float:
    """Return the largest absolute difference between the first drafter's weights and any other's."""
    first, *others = ([p.cpu() for p in d.parameters()] for d in drafters)
    return max((float((a - b).abs().max()) for other in others for a, b in zip(first, other, strict=True)), default=0.0)


def _silent(step: int, numbers: Numbers) -> None:
    pass
