"""Checkpoints: the state of a run after a whole step, complete on disk or not there, and what may go on from it.

A checkpoint is a folder such as ``step-000045`` with ``model.safetensors`` (the float32 weights that the optimizer steps),
``optimizer.safetensors`` and ``state.json``. One replica's state is every replica's: they are equal bit for bit after a step.
Random numbers have no state to save, as each is drawn by a generator made from the seed, the step or item of work, and the
replica; so the step's number is the state of all of them, of the schedule, and the position in the data.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import GENERATION_CONFIG_NAME

import data
from backend import BACKEND
from config import Config, ConfigError
from data import Source

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
FORMAT = 1
KEPT = 2
"""Checkpoints that stay: the newest, and the one before in case the newest cannot be read."""

NOT_IN_CONTRACT = frozenset(
    (
        # How the work is done, not what it is.
        *(
            "device",
            "attention",
            "compile_target",
            "targets",
            "queue_depth",
            "save_every",
            "node_timeout",
            "collective_timeout",
            "metrics",
            "trust_remote_code",
        ),
        # Places; what is there is in the contract by its content.
        *("target", "text", "data", "cache"),
        # What measures the weights.
        *("tau", "eval_every", "eval_prompts", "eval_prompt_length", "eval_new_tokens"),
    )
)
"""Options that may change at a resume. All others change the weights that come out."""

_NAME = re.compile(r"step-(\d{6,})")
_PIECES = 64
_PIECE = 2**16


class Snapshot(NamedTuple):
    """A replica's state after a whole step.

    Attributes:
        step: steps behind it.
        weights: of the drafter, by parameter.
        optimizer: see `optimizer.Optimizers.state`.
    """

    step: int
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that can be read and may be resumed.

    Attributes:
        path: its folder.
        step: steps behind it.
        seconds: of training behind it.
        notes: what whoever resumes should know, in whole sentences.
    """

    path: Path
    step: int
    seconds: float
    notes: tuple[str, ...] = ()

    def snapshot(self) -> Snapshot:
        """Read the tensors, onto the CPU."""
        return Snapshot(self.step, load_file(self.path / MODEL), load_file(self.path / OPTIMIZER))


def contract(config: Config, source: Source, drawn: Mapping[str, Any] | None = None, nodes: int = 1) -> dict[str, Any]:
    """Return what must be the same at a resume, in JSON's types.

    Args:
        config: the options; the target's files are looked at.
        source: what the run is trained on, as token ids, which the target's tokenizer is in, too.
        drawn: see `cache.Cache.drawn`; None for a run whose targets make the work.
        nodes: how many train together.
    """
    options = {name: value for name, value in config.as_json().items() if name not in NOT_IN_CONTRACT}
    return {
        "options": json.loads(json.dumps(options)),
        "target": target_fingerprint(config.target),
        "text": data.digest(source),
        "cache": None if drawn is None else dict(drawn),
        **({"nodes": nodes} if nodes > 1 else {}),
    }


def environment(config: Config) -> dict[str, str]:
    """Return what results depend on in their last bits only, and what may therefore change, with a note."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "backend": BACKEND,
        "devices": ", ".join(sorted({device.type for device in config.devices()})),
        "attention": config.attention,
        "compile_target": str(config.compile_target),
    }


def target_fingerprint(folder: Path) -> str:
    """Return a hash of a target's configuration, its settings for generation, its own code, and samples of its weights.

    64 pieces of 64 KiB, spread evenly over each weight file, and its size: another model and another fine-tune of the same
    one differ in most of them, while sizes and headers alone are those of every fine-tune. All the bytes of a large target
    would take a minute or more at every start.
    """
    found = hashlib.sha256()
    # What ends an answer may stand in the settings for generation alone, which a target need not have.
    several = (path for pattern in (GENERATION_CONFIG_NAME, "*.py", "*.safetensors") for path in folder.glob(pattern))
    for path in sorted([folder / "config.json", *several]):
        size = path.stat().st_size
        found.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if path.suffix != ".safetensors" or size <= _PIECES * _PIECE:
                found.update(file.read())
            else:
                for piece in range(_PIECES):
                    file.seek((size - _PIECE) * piece // (_PIECES - 1))
                    found.update(file.read(_PIECE))
    return found.hexdigest()


class Checkpoints:
    """The checkpoints of a run.

    Args:
        folder: theirs alone; made by the first `save`.
        config: the run's options.
        source: what it is trained on.
        drawn, nodes: see `contract`.
    """

    def __init__(
        self, folder: Path, config: Config, source: Source, drawn: Mapping[str, Any] | None = None, nodes: int = 1
    ) -> None:
        self.folder = folder
        self._uses = config.uses
        self._contract = contract(config, source, drawn, nodes)
        self._environment = environment(config)

    def resumable(self) -> Checkpoint | None:
        """Return the newest checkpoint that can be read, or None if there are no checkpoints; nothing is changed.

        Raises:
            ConfigError: if it was made under another contract, or none of several can be read.
        """
        notes = []
        for step, path in reversed(by_step(self.folder)):
            try:
                state = self._read(path, step)
            except Exception as error:  # whatever is wrong with the files
                notes.append(f"checkpoint {path} cannot be read, an older one is looked for ({error})")
                continue
            if differences := differing(state["contract"], self._contract):
                raise ConfigError(
                    f"checkpoint {path} cannot be resumed like this: {'; '.join(differences)}: "
                    "make them the same, or name another folder with --run"
                )
            for name, here in self._environment.items():
                if (there := state["environment"].get(name)) != here:
                    notes.append(
                        f"checkpoint {path} was made with {name} {there}, and this is {here}: "
                        "results go on, but not bit for bit as they would have there"
                    )
            return Checkpoint(path, step, float(state["seconds"]), tuple(notes))
        if notes:
            raise ConfigError(f"{notes[0]}, and there is none that can be: begin again with --restart")
        return None

    def save(self, snapshot: Snapshot, seconds: float) -> None:
        """Save a state that does not change meanwhile; then drop all but the newest checkpoints.

        Killed at any moment, the process leaves the new checkpoint complete or not there, and the one before it in any case:
        all is written and synced under a hidden name first, and renamed as a whole.
        """
        path = self.folder / f"step-{snapshot.step:06d}"
        if path.exists():
            return  # the same contract and step: the same content
        new = self.folder / f".{path.name}.{os.getpid()}.new"
        new.mkdir(parents=True)
        try:
            self._write(new, snapshot, seconds)
            new.rename(path)
        except BaseException:
            shutil.rmtree(new)  # a full disk is the likeliest cause
            raise
        sync(self.folder)
        for _, old in by_step(self.folder)[:-KEPT]:
            shutil.rmtree(old)

    def begin(self, checkpoint: Checkpoint | None) -> None:
        """Make room for what follows ``checkpoint``: newer ones, which could not be read, get out of the way; all if None.

        Raises:
            OSError: if the folder cannot be changed.
        """
        if checkpoint is None:
            if self.folder.exists():
                shutil.rmtree(self.folder)
            return
        for leftover in self.folder.glob(".step-*.new"):
            shutil.rmtree(leftover)
        for step, path in by_step(self.folder):
            if step > checkpoint.step:
                aside = path.with_name(f"unreadable-{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)

    def _write(self, path: Path, snapshot: Snapshot, seconds: float) -> None:
        for name, tensors in ((MODEL, snapshot.weights), (OPTIMIZER, snapshot.optimizer)):
            on_cpu = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
            save_file(on_cpu, path / name, {"format": "pt", "step": str(snapshot.step)})
        state = {
            "format": FORMAT,
            "step": snapshot.step,
            "item": snapshot.step // self._uses,
            "seconds": round(seconds, 2),
            "contract": self._contract,
            "environment": self._environment,
        }
        (path / STATE).write_text(json.dumps(state, indent=2) + "\n")
        for written in (*path.iterdir(), path):
            sync(written)

    def _read(self, path: Path, step: int) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((path / STATE).read_text())
        if state["format"] != FORMAT:
            raise ValueError(f"its format is {state['format']}, and {FORMAT} is known here")
        if (state["step"], state["item"]) != (step, step // state["contract"]["options"]["uses"]):
            raise ValueError(f"{STATE} tells of step {state['step']} and item {state['item']}")
        for name in (MODEL, OPTIMIZER):
            with safe_open(path / name, framework="pt") as file:  # refuses a file that is cut off
                if (behind := (file.metadata() or {}).get("step")) != str(step):
                    raise ValueError(f"{name} is of step {behind}")
        return state


def differing(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return in which ways two contracts differ, none if they are the same."""
    differences = [
        f"{name} is {before!r} there and {now!r} here"
        for name in sorted(there["options"].keys() | here["options"].keys())
        if (before := there["options"].get(name)) != (now := here["options"].get(name))
    ]
    differences += [f"the {what} is another one" for what in ("target", "text") if there[what] != here[what]]
    if (before := there.get("cache")) != (now := here["cache"]):
        differences.append(f"the cache was drawn by {before} there and by {now} here")
    if (before := there.get("nodes", 1)) != (now := here.get("nodes", 1)):
        differences.append(f"nodes are {before} there and {now} here")
    return differences


def by_step(folder: Path) -> list[tuple[int, Path]]:
    """Return step and path of all checkpoints in ``folder``, oldest first, whether they can be read or not."""
    if not folder.is_dir():
        return []
    return sorted((int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)))


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
