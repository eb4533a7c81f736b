"""Evaluation while training goes on: a thread that measures copies of the drafter's weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

import devices
import evaluate
from config import Config
from drafter import Drafter
from evaluate import Reference
from monitor import Monitor
from pipeline import Stopped
from speculative import DFlashProposer
from target import Target


class Copied(NamedTuple):
    """A copy of a drafter's weights, by parameter, after ``step`` steps, which is there when ``ready`` comes."""

    step: int
    weights: dict[str, Tensor]
    ready: devices.Event


class Evaluator:
    """Measures a drafter that is being trained: the evaluation's thread calls `run`, the drafter's threads the rest.

    Copies are measured one after the other. One may wait: a newer one takes its place, so that training never waits for an
    evaluation. What is measured is a metric ``evaluation`` (see `evaluate.metrics`); a copy that is not measured is a metric
    ``evaluation_skipped``, whose ``newer`` is the step of the copy that took its place, or None where the run ended.

    Args:
        config: validated options.
        target: read at the same time by a target thread.
        drafter: on the target's device; its weights are replaced.
        references: what to decode.
        write: takes a metric's kind and its values, in any thread.
    """

    def __init__(
        self,
        config: Config,
        target: Target,
        drafter: Drafter,
        references: list[Reference],
        write: Callable[..., None],
    ) -> None:
        self._config = config
        self._target = target.shared()
        self._drafter = drafter
        self._references = references
        self._write = write
        self._changed = threading.Condition()
        self._waiting: Copied | None = None  # guarded by _changed, like the two below
        self._closed = False
        self._stopped = False

    def is_due(self, step: int) -> bool:
        """Tell whether weights after ``step`` steps are to be measured here; those at the start and at the end are measured anyway."""
        every = self._config.eval_every
        return every > 0 and 0 < step < self._config.steps and step % every == 0

    def offer(self, step: int, drafter: Drafter) -> None:
        """Hand over a copy of the weights that the calling thread's drafter has after ``step`` steps.

        To be called between two steps, by the thread that makes them.
        """
        weights = {name: weight.detach().clone() for name, weight in drafter.state_dict().items()}
        copied = Copied(step, weights, devices.mark(next(iter(weights.values())).device))
        with self._changed:
            over = self._stopped
            skipped, self._waiting = (copied, self._waiting) if over else (self._waiting, copied)
            self._changed.notify_all()
        if skipped:
            self._write("evaluation_skipped", step=skipped.step, newer=None if over else step)

    def close(self) -> None:
        """Say that no more copies come: `run` measures the one that waits, and ends."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def stop(self) -> None:
        """End `run` before its next pass of the drafter, with `Stopped`."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def run(self, monitor: Monitor) -> None:
        """Be the evaluation's thread.

        Raises:
            Stopped: if the run is over. However it fails, copies that were not measured are said to be skipped.
        """
        monitor.now("waits for weights")
        copied: Copied | None = None
        try:
            with devices.own_stream(self._target.device):
                while copied := self._take():
                    monitor.now("evaluates")
                    self._write("evaluation", step=copied.step, **self._measure(copied, monitor))
                    copied = None
                    monitor.now("waits for weights")
        except BaseException:
            self.stop()  # what is offered from now on is not measured either
            for left in (copied, self._waiting):
                if left:
                    self._write("evaluation_skipped", step=left.step, newer=None)
            raise

    def _take(self) -> Copied | None:
        """Wait for a copy; return None once there is none and no more come.

        Raises:
            Stopped: if the run is over.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._waiting or self._closed)
            self._check()
            copied, self._waiting = self._waiting, None
            return copied

    def _measure(self, copied: Copied, monitor: Monitor) -> dict[str, Any]:
        block_size = self._config.block_size
        devices.wait(self._target.device, [copied.ready])
        self._drafter.load_state_dict(copied.weights)
        devices.keep(copied.weights.values())
        began = time.monotonic()
        found = evaluate.measure(
            self._config,
            self._target,
            lambda: DFlashProposer(self._drafter, self._target, block_size),
            self._references,
            self._check,
        )
        monitor.count(sum(len(decoded.tokens) for decoded in found.decoded))
        return evaluate.metrics(found, block_size - 1, time.monotonic() - began)

    def _check(self) -> None:
        if self._stopped:
            raise Stopped
