"""The folder of a run: all that it writes. Files are JSON, JSON lines, safetensors and pictures, never pickle."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_file
from torch import Tensor

from checkpoints import NOT_IN_CONTRACT, by_step, sync
from config import Config, ConfigError
from metrics import Factory, JsonLines, MetricsError, Sink, blamed_on

OPTIONS = "options.json"
METRICS = "metrics.jsonl"
METRICS_OF_NODE = "metrics-node{}.jsonl"
EVALUATION = "evaluation.json"
SUMMARY = "summary.json"
DRAFTER = "drafter"
CHECKPOINTS = "checkpoints"

Start = Literal["fresh", "resume", "restart"]
"""How a run begins: ``fresh`` where nothing is that could go on, ``resume`` from what is there, ``restart`` in its place."""


class RunFolder:
    """A folder for the results of one configuration.

    The same configuration may be run again: each file stays until the new run replaces it as a whole.
    """

    def __init__(
        self,
        path: Path,
        config: Config,
        start: Start = "fresh",
        factories: Mapping[str, Factory] | None = None,
        node: int = 0,
    ) -> None:
        """Take the folder, made if it is missing, without changing what is in it but the options that a resume may change.

        Args:
            path: where it is or shall be.
            config: what it is for.
            start: see `Start`.
            factories: of what takes the metrics besides the folder's own file, by name.
            node: the one of several nodes that this is; node 0 alone writes more than a file of metrics.

        Raises:
            ConfigError: if it holds a run of another configuration, or anything else, or cannot be written; if there are
                checkpoints that a fresh start would replace; if there is nothing to resume.
        """
        self.path = path
        self._config = config
        self._lock = threading.Lock()
        self._factories = factories or {}
        self._metrics = path / (METRICS_OF_NODE.format(node) if node else METRICS)
        self._json_lines = JsonLines(self._metrics)
        self._sinks: dict[str, Sink] = {}  # guarded by _lock, like the one below
        self._early: list[tuple[str, dict[str, Any]]] | None = []  # metrics until the run's file of them begins
        if node:
            path.mkdir(parents=True, exist_ok=True)
            return
        options = path / OPTIONS
        may_change = NOT_IN_CONTRACT if start == "resume" else frozenset()
        try:
            if start == "resume" and not options.exists():
                raise ConfigError(
                    f"run folder {path} holds no run to resume: name its folder with --run, or leave out --resume"
                )
            path.mkdir(parents=True, exist_ok=True)
            if options.exists():
                before = json.loads(options.read_text())
                now = json.loads(json.dumps(config.as_json()))
                names = (before.keys() | now.keys()) - may_change
                if changed := sorted(name for name in names if before.get(name) != now.get(name)):
                    raise ConfigError(
                        f"run folder {path} holds a run with another configuration ({', '.join(changed)} differ): "
                        "name another folder with --run, or delete this one"
                    )
            elif any(not is_leftover(entry) for entry in path.iterdir()):
                raise ConfigError(f"run folder {path} is not empty and holds no run: name another folder with --run")
            if start == "fresh" and (saved := by_step(path / CHECKPOINTS)):
                raise ConfigError(
                    f"run folder {path} holds a run that was saved at step {saved[-1][0]}: "
                    "go on from there with --resume, or begin again with --restart, which deletes its checkpoints"
                )
            self.write_json(OPTIONS, config.as_json())
        except (OSError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"run folder {path} cannot be used: {error}") from error

    def open_sinks(self, first_step: int) -> None:
        """Open what takes the metrics besides the folder's own file; to be called before `begin` or `resume`.

        Args:
            first_step: the first one to come; those from there on, of the run before, did not happen.

        Raises:
            MetricsError: if one cannot be opened.
        """
        for name, factory in self._factories.items():
            with blamed_on(name):
                self._sinks[name] = factory(self.path, first_step, self._config.as_json())

    def begin(self) -> None:
        """Start the metrics anew; until then or until `resume`, those of the run before stay, and new ones wait."""
        for old in self.path.glob(METRICS_OF_NODE.format("*")) if self._metrics.name == METRICS else ():
            old.unlink()  # before other nodes begin theirs: there may have been more
        self._metrics.write_text("")
        self._append_early()

    def resume(self, step: int, seconds: float) -> None:
        """Keep the metrics of ``step`` steps and ``seconds`` of training; lines after them are of work that was not saved.

        What was measured after exactly ``step`` steps is dropped, too: it is measured again.
        """

        def saved(line: dict[str, Any]) -> bool:
            if line["kind"] == "thread":
                return bool(line["seconds"] <= seconds)
            return line["kind"] == "resume" or bool(line.get("step", -1) < step)

        kept = list(filter(saved, self._lines()))
        last = {line["thread"]: line["state"] for line in kept if line["kind"] == "thread"}
        kept.append({"kind": "resume", "step": step})
        kept += [
            {"kind": "thread", "seconds": seconds, "thread": thread, "state": "done"}
            for thread, state in last.items()
            if state != "done"  # there may be fewer threads now
        ]
        new = _beside(self._metrics)
        new.write_text("".join(json.dumps(line) + "\n" for line in kept))
        new.replace(self._metrics)
        self._append_early()

    def _append_early(self) -> None:
        with self._lock:
            early, self._early = self._early or [], None
            for kind, values in early:
                self._write(kind, values)

    def _write(self, kind: str, values: dict[str, Any]) -> None:
        self._json_lines.write(kind, values)
        for name, sink in self._sinks.items():
            with blamed_on(name):
                sink.write(kind, values)

    def close(self, grace: float = 8.0) -> None:
        """Close what takes the metrics; those that come later, from threads left behind, go into the folder's own file alone.

        Args:
            grace: seconds to wait for a thread that is handing a metric over, which may have been left behind there.

        Raises:
            MetricsError: if one fails; the others are closed, too. If a metric is still being handed over: none is closed then.
        """
        if not self._lock.acquire(timeout=grace):
            raise MetricsError(", ".join(self._sinks), TimeoutError("a write has not come to its end"))
        try:
            sinks, self._sinks = self._sinks, {}
        finally:
            self._lock.release()
        with ExitStack() as stack:  # ends in all of them, whichever fails
            for name, sink in sinks.items():
                stack.enter_context(blamed_on(name))
                stack.callback(sink.close)

    def sync_metrics(self) -> None:
        """Wait until all metrics are on the disk."""
        with self._metrics.open("a") as file:
            os.fsync(file.fileno())

    def metric(self, kind: str, **values: Any) -> None:
        """Add a line to the metrics; any thread may. Before `begin` or `resume` it waits for that.

        Raises:
            OSError: if the line cannot be written.
            MetricsError: if what takes the metrics, besides the folder's own file, fails.
        """
        with self._lock:
            if self._early is not None:
                self._early.append((kind, values))
            else:
                self._write(kind, values)

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        """Return the metrics of one kind."""
        return [values for values in self._lines() if values.pop("kind") == kind]

    def _lines(self) -> list[dict[str, Any]]:
        """Return all metrics, without a line that was cut off when a process was killed."""
        found = []
        for line in self._metrics.read_text().splitlines() if self._metrics.exists() else ():
            with suppress(ValueError):
                found.append(json.loads(line))
        return found

    def write_json(self, name: str, content: Any) -> None:
        """Write or replace a JSON file as a whole."""
        write_json(self.path / name, content)


def write_json(path: Path, content: Any) -> None:
    """Write or replace a JSON file as a whole: whoever reads it sees the old content or the new, after a power cut, too."""
    new = _beside(path)
    new.write_text(json.dumps(content, indent=2) + "\n")
    sync(new)
    new.replace(path)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write or replace a safetensors file as `write_json` does, with ``metadata`` in its header; whom the umask lets may read it."""
    new = _beside(path)
    new.touch()
    mode = new.stat().st_mode
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, new, metadata)
    new.chmod(stat.S_IMODE(mode))  # safetensors lets its owner alone read a file, which a server may not be
    sync(new)
    new.replace(path)


def _beside(path: Path) -> Path:
    """Return a name on the same file system, of this process and thread alone, to be renamed to ``path`` when complete."""
    return path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.new")


def is_leftover(entry: Path) -> bool:
    """Tell whether a file is what a killed process left of one that it had not written as a whole."""
    return entry.name.startswith(".") and entry.name.endswith(".new")
