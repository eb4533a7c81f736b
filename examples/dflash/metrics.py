"""Where metrics go: to ``metrics.jsonl`` always, and to TensorBoard or whatever else the options name."""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from config import ConfigError

FOLDER = "tensorboard"
"""Where TensorBoard's files are in the run folder."""


class Sink(Protocol):
    """Something that takes metrics while a run goes on.

    It is called by one thread at a time, but by whichever has something to say: a drafter's thread waits until `write` returns. What
    either method raises ends the run with that error, as a full disk does.
    """

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        """Take one metric.

        Args:
            kind: as in ``metrics.jsonl``, such as ``step``; see the README for all of them.
            values: what is in the line, in JSON's types; not to be changed.
        """
        ...

    def close(self) -> None:
        """Take it that no more come, and have everything where it belongs; called once, however the run ends."""
        ...


Factory = Callable[[Path, int, Mapping[str, Any]], Sink]
"""Makes a sink when training begins, from the run folder, the first step to come, and all options.

At a resume the first step is that of the checkpoint: metrics with a ``step`` from there on, of the run before, did not happen.
"""


class MetricsError(RuntimeError):
    """A sink failed; the cause is its own exception."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(
            f"metrics could not be handed to {name}: {type(error).__name__}: {error}; "
            "repair that, or go on without it, with --resume and other --metrics"
        )


@contextmanager
def blamed_on(name: str) -> Iterator[None]:
    """Inside, an error is a sink's of that name, and is raised as a `MetricsError`."""
    try:
        yield
    except MetricsError:  # has a name
        raise
    except Exception as error:
        raise MetricsError(name, error) from error


def factories(names: Sequence[str]) -> dict[str, Factory]:
    """Return what makes the sinks that the options name: ``tensorboard``, or ``package.module:factory`` that Python can import.

    Raises:
        ConfigError: if there is no such thing.
    """
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"metrics names {twice} twice: leave one out")
    return {name: _tensorboard() if name == "tensorboard" else _imported(name) for name in names}


def _tensorboard() -> Factory:
    try:
        import torch.utils.tensorboard  # noqa: F401  # needed by few runs
    except ImportError as error:
        raise ConfigError(
            f"metrics names tensorboard, which cannot be imported ({error}): pip install tensorboard"
        ) from error
    return TensorBoard


def _imported(name: str) -> Factory:
    if ":" not in name:
        raise ConfigError(f"metrics names {name!r}: use tensorboard, or package.module:factory")
    try:
        factory = pkgutil.resolve_name(name)
    except Exception as error:  # whatever importing somebody's module may raise
        raise ConfigError(
            f"metrics names {name}, which cannot be imported ({type(error).__name__}: {error}): is its folder in PYTHONPATH?"
        ) from error
    if not callable(factory):
        raise ConfigError(f"metrics names {name}, which cannot be called: name a function or class that makes a sink")
    made: Factory = factory
    return made


class JsonLines:
    """Appends a line for each metric to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        """See `Sink`."""
        with self._path.open("a") as file:
            file.write(json.dumps({"kind": kind, **values}) + "\n")

    def close(self) -> None:
        """See `Sink`; each line is there once it is written."""


class TensorBoard:
    """Writes each number of a metric that has a step as a scalar, by names such as ``step/loss``; see `scalars`.

    After a kill, metrics of the last seconds may be missing there; ``metrics.jsonl`` has them.
    """

    def __init__(self, run: Path, first_step: int, options: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run / FOLDER
        if first_step == 0:
            for old in folder.glob("events.out.tfevents.*"):
                old.unlink()
        # From this step on, TensorBoard forgets what files of the run before say.
        self._writer = SummaryWriter(folder, purge_step=first_step or None, flush_secs=10)

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        """See `Sink`."""
        if "step" in values:
            for name, number in scalars(kind, {key: value for key, value in values.items() if key != "step"}):
                self._writer.add_scalar(name, number, values["step"])

    def close(self) -> None:
        """See `Sink`."""
        self._writer.close()


def scalars(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Return all numbers in a value, each by a name with the keys on the way to it, and the places in lists, from 1.

    A text beside numbers says whose they are, and comes before them: ``{"device": "cpu", "resident": 5}`` is ``NAME/cpu/resident``.
    """
    if isinstance(value, Mapping):
        owner = "/".join([name, *(text for text in value.values() if isinstance(text, str))])
        for key, part in value.items():
            yield from scalars(f"{owner}/{key}", part)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for place, part in enumerate(value, 1):
            yield from scalars(f"{name}/{place}", part)
    elif isinstance(value, int | float):
        yield name, float(value)
