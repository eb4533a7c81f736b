"""The folder of a run: all that it writes. Files are JSON, JSON lines, safetensors and pictures, never pickle."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from config import Config, ConfigError

OPTIONS = "options.json"
METRICS = "metrics.jsonl"
EVALUATION = "evaluation.json"
SUMMARY = "summary.json"
DRAFTER = "drafter"


class RunFolder:
    """A folder for the results of one configuration.

    The same configuration may be run again: each file stays until the new run replaces it as a whole.
    """

    def __init__(self, path: Path, config: Config) -> None:
        """Take the folder, made if it is missing, without changing what is in it.

        Raises:
            ConfigError: if it holds a run of another configuration, or anything else, or cannot be written.
        """
        self.path = path
        self._config = config
        self._lock = threading.Lock()
        options = path / OPTIONS
        try:
            path.mkdir(parents=True, exist_ok=True)
            if options.exists():
                before = json.loads(options.read_text())
                now = json.loads(json.dumps(config.as_json()))
                if changed := sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name)):
                    raise ConfigError(
                        f"run folder {path} holds a run with another configuration ({', '.join(changed)} differ): "
                        "name another folder with --run, or delete this one"
                    )
            elif any(not _is_leftover(entry) for entry in path.iterdir()):
                raise ConfigError(f"run folder {path} is not empty and holds no run: name another folder with --run")
            self.write_json(OPTIONS, config.as_json())
        except (OSError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"run folder {path} cannot be used: {error}") from error

    def begin(self) -> None:
        """Start the metrics anew."""
        (self.path / METRICS).write_text("")

    def metric(self, kind: str, **values: Any) -> None:
        """Append a line to the metrics; any thread may."""
        line = json.dumps({"kind": kind, **values}) + "\n"
        with self._lock, (self.path / METRICS).open("a") as file:
            file.write(line)

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        """Return the metrics of one kind."""
        lines = (self.path / METRICS).read_text().splitlines()
        return [values for values in map(json.loads, lines) if values.pop("kind") == kind]

    def write_json(self, name: str, content: Any) -> None:
        """Write or replace a JSON file as a whole."""
        write_json(self.path / name, content)


def write_json(path: Path, content: Any) -> None:
    """Write or replace a JSON file as a whole: whoever reads it sees the old content or the new."""
    new = _beside(path)
    new.write_text(json.dumps(content, indent=2) + "\n")
    new.replace(path)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write or replace a safetensors file as a whole, with ``metadata`` in its header."""
    new = _beside(path)
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, new, metadata)
    new.replace(path)


def _beside(path: Path) -> Path:
    """Return a name on the same file system, of this process and thread alone, to be renamed to ``path`` when complete."""
    return path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.new")


def _is_leftover(entry: Path) -> bool:
    return entry.name.startswith(".") and entry.name.endswith(".new")
