"""Features on disk: batches of work, made once by the targets and learned from without them, in any number of runs.

A folder with ``index.json`` and one safetensors file for each batch of work: tokens, loss mask and the target's features. A file
is there as a whole or not at all, so that making a cache goes on where it was ended.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import data
from checkpoints import target_fingerprint
from config import Config, ConfigError
from data import Source
from run_folder import is_leftover, write_json, write_tensors
from target import Features

INDEX = "index.json"
FORMAT = 1

_LEFTOVERS = (".work-*.new", ".index.json.*.new", ".tmp*")
"""What killed processes leave, the last by safetensors itself; each may be as large as a batch of work."""


class Stored(NamedTuple):
    """A batch of work, on the CPU: see `work.Work`."""

    tokens: Tensor
    loss_mask: Tensor
    features: Features
    documents: Tensor | None


class Cache:
    """The batches of work in a folder, by number; after the last the first comes again.

    Args:
        folder: theirs alone.
        works: how many there are, or will be.
        drawn_by: which sequences they are of, from the index.
    """

    def __init__(self, folder: Path, works: int, drawn_by: Mapping[str, Any]) -> None:
        self.folder = folder
        self.works = works
        self._drawn_by = drawn_by

    @property
    def drawn(self) -> dict[str, Any]:
        """What says which batches a run reads at which step, in JSON's types: two caches that differ in it train differently."""
        return {"works": self.works, **self._drawn_by}

    def missing(self) -> list[int]:
        """Return the numbers of those that are not there yet."""
        return [number for number in range(self.works) if not self.path_of(number).exists()]

    def write(
        self, number: int, tokens: Tensor, loss_mask: Tensor, features: Features, documents: Tensor | None = None
    ) -> None:
        """Write one; any thread may, each another number."""
        tensors = {"tokens": tokens.int(), "loss_mask": loss_mask, **features._asdict()}
        if documents is not None:
            tensors["documents"] = documents.int()
        write_tensors(self.path_of(number), tensors, {"format": "pt"})

    def read(self, number: int) -> Stored:
        """Read one, as bit-equal as it was written."""
        tensors = load_file(self.path_of(number % self.works))
        features = Features(tensors["tapped"], tensors["normed"])
        documents = tensors["documents"].long() if "documents" in tensors else None
        return Stored(tensors["tokens"].long(), tensors["loss_mask"], features, documents)

    def path_of(self, number: int) -> Path:
        """Return the file of one."""
        return self.folder / f"work-{number:08d}.safetensors"


def works_of(config: Config) -> int:
    """Return how many batches of work a run takes."""
    return -(-config.steps // config.uses) * config.drafters


def size_of(config: Config, token_bytes: int) -> int:
    """Return the bytes of one batch of work.

    Args:
        config: the options.
        token_bytes: of one token's features.
    """
    ids = torch.int32.itemsize * (2 if config.packing else 1)
    return config.sequences * config.length * (token_bytes + ids + torch.bool.itemsize)


def begin(folder: Path, config: Config, source: Source, taps: tuple[int, ...], token_bytes: int) -> Cache:
    """Return a new cache in ``folder`` for a run with these options, or one to go on with, without what killed processes left.

    Args:
        folder: made if it is missing.
        config: the options.
        source: what sequences are drawn from.
        taps: the tapped layers.
        token_bytes: of one token's features.

    Raises:
        ConfigError: if the folder holds a cache of other work or anything else, cannot be written, or has too little space.
    """
    wanted = _contract(config, source, taps)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / INDEX).exists():
            index = _index(folder)
            _compare(folder, index["contract"] | index["drawn_by"], wanted | _drawn_by(config))
            works = max(index["works"], works_of(config))
            for leftover in (entry for pattern in _LEFTOVERS for entry in folder.glob(pattern)):
                leftover.unlink()
        elif any(not is_leftover(entry) for entry in folder.iterdir()):
            raise ConfigError(f"cache {folder} is not empty and holds no cache: name another folder")
        else:
            works = works_of(config)
        cache = Cache(folder, works, _drawn_by(config))
        needed, free = len(cache.missing()) * size_of(config, token_bytes), shutil.disk_usage(folder).free
        if needed > free:
            raise ConfigError(
                f"cache {folder} needs {needed / 1e9:,.1f} GB more, and {free / 1e9:,.1f} GB are free: make it of fewer steps"
            )
        write_json(
            folder / INDEX,
            {"format": FORMAT, "works": works, "contract": wanted, "drawn_by": _drawn_by(config)},
        )
    except OSError as error:
        raise ConfigError(f"cache {folder} cannot be written: {error}") from error
    return cache


def open_complete(folder: Path, config: Config, source: Source, taps: tuple[int, ...]) -> Cache:
    """Return the cache in ``folder`` for training with these options; seed, steps and number of drafters may be others.

    Raises:
        ConfigError: if there is none, it is of other work, not complete or damaged.
    """
    if not (folder / INDEX).is_file():
        raise ConfigError(f"cache is {folder}, and that holds no cache: make one with --make-cache {folder}")
    index = _index(folder)
    _compare(folder, index["contract"], _contract(config, source, taps))
    cache = Cache(folder, index["works"], index["drawn_by"])
    if missing := len(cache.missing()):
        raise ConfigError(
            f"cache {folder} lacks {missing} of its {cache.works} batches of work: go on with --make-cache {folder}"
        )
    for number in range(cache.works):
        path = cache.path_of(number)
        try:
            with safe_open(path, framework="pt"):
                pass
        except Exception as error:  # whatever is wrong with the file
            raise ConfigError(f"cache file {path} is damaged, delete it and make it again: {error}") from error
    return cache


def _contract(config: Config, source: Source, taps: tuple[int, ...]) -> dict[str, Any]:
    """Return what a cache must have in common with a run, in JSON's types."""
    names = ("answers", "temperature", "prompt_length", "response_length", "sequences", "target_dtype")
    return {
        "target": target_fingerprint(config.target),
        "taps": list(taps),
        "text or data": data.digest(source),
        **{name: getattr(config, name) for name in names},
    }


def _drawn_by(config: Config) -> dict[str, Any]:
    """Return what says which sequences are drawn, so that a cache that is gone on with is one."""
    return {"seed": config.seed, "drafters": config.drafters}


def _index(folder: Path) -> dict[str, Any]:
    try:
        index = json.loads((folder / INDEX).read_text())
        if index["format"] != FORMAT:
            raise ConfigError(f"cache {folder} has format {index['format']}, this program reads {FORMAT}")
        return {name: index[name] for name in ("works", "contract", "drawn_by")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"cache index {folder / INDEX} cannot be read: {error!r}") from error


def _compare(folder: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    changed = [
        f"{name} is {there.get(name)} there and {here.get(name)} here"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]
    if changed:
        raise ConfigError(f"cache {folder} is of other work: {'; '.join(changed)}")
