"""The threads while they run: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.live import Live
from rich.table import Table

from monitor import COMPILES, Monitor
from train import Training

EVERY_STEPS = 20


class Display:
    """Shows a training run; `tick` is to be called often, in the thread that made it; `stop` ends it.

    Args:
        training: what to show.
        console: where; if it is no terminal, each 20th step is a line.
    """

    def __init__(self, training: Training, console: Console) -> None:
        self._training = training
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        if self._live:
            self._live.start()
        self._next_step = 0
        self._drawn = 0.0

    def stop(self) -> None:
        """Give the terminal back."""
        if self._live:
            self._live.stop()

    def tick(self, states: dict[str, str]) -> None:
        """Draw, or print a line if it is time for one; ``states`` are the threads' states from the monitor."""
        losses = self._training.replicas[0].losses
        if self._live is None:
            if len(losses) > self._next_step:
                self._next_step = (len(losses) // EVERY_STEPS + 1) * EVERY_STEPS
                self._console.print(progress(self._training), soft_wrap=True, highlight=False)
        elif time.monotonic() - self._drawn > 0.5:  # a drawing takes some of the time that the threads share
            self._drawn = time.monotonic()
            self._live.update(table(self._training, states), refresh=True)


def progress(training: Training) -> str:
    """Return one line that says how far training is."""
    losses = training.replicas[0].losses
    loss = f"{losses[-1]:6.3f}" if losses else "     -"
    threads = training.monitor.threads
    rate = sum(t.tokens_per_second for name, t in threads.items() if name.startswith("drafter"))
    return (
        f"step {training.step:4d} of {training.config.steps}  loss {loss}  {rate:6.0f} tok/s  "
        f"{training.waiting} batches of work waiting  {_compiled(training.monitor):4.1f} s compiling"
    )


def table(training: Training, states: dict[str, str]) -> Table:
    """Return the table of all threads."""
    shown = Table(title=progress(training))
    for heading in ("thread", "state"):
        shown.add_column(heading)
    for heading in ("tok/s", "queue", "compiles, s", "waits, s"):
        shown.add_column(heading, justify="right")
    for name, thread in training.monitor.threads.items():
        kind, _, index = name.partition("-")
        depth = f"{len(training.queues[int(index)])}" if kind == "drafter" else ""
        compiled = thread.seconds.get(COMPILES, 0.0)
        state = states.get(name, thread.state)
        shown.add_row(name, state, f"{thread.tokens_per_second:.0f}", depth, f"{compiled:.1f}", f"{thread.waited:.1f}")
    return shown


def _compiled(monitor: Monitor) -> float:
    return sum(t.seconds.get(COMPILES, 0.0) for t in monitor.threads.values())
