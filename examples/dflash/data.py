"""What sequences are drawn from: text or conversations, their held-out part; and random numbers by key.

The corpus is the source code of Python's own standard library: it is on every machine that can run this example, so
nothing is downloaded. A folder of any other text can be named. For a target without a tokenizer a byte is a token; two ids
below the bytes are the end of text and the drafter's mask token.
"""

from __future__ import annotations

import hashlib
import sysconfig
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from config import ConfigError

EOS_ID = 0
"""A byte-level target's id of the end of text."""

MASK_ID = 1
"""Its id of the mask token that fills a draft block; the target never sees it in its training text."""

BYTE_OFFSET = 2
"""Id of byte 0."""

VOCAB_SIZE = BYTE_OFFSET + 256

# Tests and bundled wheels are not library code; `encodings` and `pydoc_data` are tables; the others are absent from newer or
# trimmed Pythons, and leaving them out keeps the corpus alike everywhere.
_LEFT_OUT = frozenset(
    (
        *("test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "distutils", "msilib"),
        *("encodings", "pydoc_data", "site-packages", "dist-packages", "_bundled", "__pycache__"),
    )
)

HELD_OUT_ONE_IN = 16
"""One file or conversation of this many is for evaluation."""


class Sample(NamedTuple):
    """A conversation, its beginning, or several conversations one after the other.

    Attributes:
        tokens: int32 ``[n]``.
        supervised: bool ``[n]``, True on answers to learn from.
        documents: int32 ``[n]``, which of several conversations a token is of, from 0; None for one.
    """

    tokens: Tensor
    supervised: Tensor
    documents: Tensor | None = None


_OPEN = 32


def pack(samples: Sequence[Sample], length: int) -> list[Sample]:
    """Return sequences of at most ``length`` tokens with as many whole conversations as fit, in a shuffled order, always the same.

    Each conversation goes into the first sequence it fits into, of the last 32: looking at all would take the square of their number.
    """
    bins: list[list[Sample]] = []
    room: list[int] = []
    for index in _order(len(samples), 0, -1):
        sample = samples[index]
        count = len(sample.tokens)
        first = max(0, len(bins) - _OPEN)
        place = next((p for p in range(first, len(bins)) if room[p] >= count), None)
        if place is None:
            bins.append([])
            room.append(length)
            place = len(bins) - 1
        bins[place].append(sample)
        room[place] -= count
    return [
        Sample(
            torch.cat([sample.tokens for sample in together]),
            torch.cat([sample.supervised for sample in together]),
            torch.cat([torch.full((len(s.tokens),), number, dtype=torch.int32) for number, s in enumerate(together)]),
        )
        for together in bins
    ]


@dataclass(frozen=True)
class Conversations:
    """Conversations to draw from, each once before any comes again.

    Attributes:
        samples: conversations, or their beginnings as prompts.
        left_out: how many of the file, from all its parts, had nothing left within the length.
    """

    samples: tuple[Sample, ...]
    left_out: int = 0

    def at(self, number: int, seed: int) -> Sample:
        """Return the one that is drawn as number ``number``, from 0; which it is follows from that and the seed alone."""
        turn, place = divmod(number, len(self.samples))
        return self.samples[_order(len(self.samples), seed, turn)[place]]


Source: TypeAlias = Tensor | Conversations
"""What sequences are drawn from: the ids of a text, int32 ``[n]``, or conversations."""


@dataclass(frozen=True)
class Corpus:
    """Two disjoint texts, UTF-8 or not."""

    train: bytes
    held_out: bytes


def is_held_out(relative_name: str) -> bool:
    """Tell whether a file is kept for evaluation, from its name alone, so that the split is the same on every Python."""
    return zlib.crc32(relative_name.encode()) % HELD_OUT_ONE_IN == 0


def load_corpus(folder: Path | None = None) -> Corpus:
    """Read text and split it.

    Without a folder: the ``*.py`` of the standard library, one file in sixteen held out. With one: every file below it that
    is UTF-8 text; if the names of so few files hold nothing out, or everything, then the last sixteenth of all text is held out.

    Raises:
        ConfigError: if there is no text.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    if not root.is_dir():
        raise ConfigError(f"text is {root}, and that is no folder")
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for path in sorted(root.rglob("*" if folder else "*.py")):
        relative = path.relative_to(root)
        if not path.is_file() or (folder is None and _LEFT_OUT.intersection(relative.parts)):
            continue
        content = path.read_bytes()
        if folder is None or _is_text(content):
            parts[is_held_out(relative.as_posix())].append(content)
    train, held_out = (b"".join(parts[flag]) for flag in (False, True))
    if not train + held_out:
        raise ConfigError(f"text is {root}: there is no text to train and evaluate on in that folder")
    if not train or not held_out:
        text = train or held_out
        cut = len(text) - len(text) // HELD_OUT_ONE_IN
        train, held_out = text[:cut], text[cut:]
    return Corpus(train, held_out)


def encode(text: bytes) -> Tensor:
    """Return a byte-level target's token ids of ``text``, int32 ``[len(text)]``."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).int() + BYTE_OFFSET if text else torch.zeros(0).int()


def decode(tokens: Tensor) -> bytes:
    """Return the bytes of a byte-level target's ids ``[n]``; the end of text and the mask token have none."""
    return bytes(t - BYTE_OFFSET for t in tokens.tolist() if t >= BYTE_OFFSET)


def generator(*key: int | str) -> torch.Generator:
    """Return a CPU generator seeded by ``key`` alone: equal keys draw equal numbers, in any thread and at any time."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def window(tokens: Tensor, length: int, rng: torch.Generator) -> Tensor:
    """Cut ``length`` consecutive ids, int64, out of ``tokens`` ``[n]`` at a place drawn from ``rng``.

    Raises:
        ValueError: if there are fewer.
    """
    if len(tokens) < length:
        raise ValueError(f"the text has {len(tokens)} tokens, a window needs {length}")
    start = int(torch.randint(len(tokens) - length + 1, (), generator=rng))
    return tokens[start : start + length].long()


def windows(tokens: Tensor, length: int, count: int, rng: torch.Generator) -> Tensor:
    """Cut what ``count`` calls of `window` would, int64 ``[count, length]``, at once, on the device of ``tokens``."""
    starts = torch.randint(len(tokens) - length + 1, (count, 1), generator=rng)
    starts = starts.to(tokens.device, non_blocking=tokens.device.type == "cuda")
    return tokens[starts + torch.arange(length, device=tokens.device)].long()


def draw_prompts(source: Source, length: int, rngs: Sequence[torch.Generator], first: int, seed: int) -> list[Tensor]:
    """Draw a prompt for each of ``rngs``, int64 ``[p]``: a window of ``length`` ids of a text, or a conversation's beginning.

    Args:
        source: where from.
        length: of a text's windows; conversations have been made short enough.
        rngs: choose windows.
        first: conversations are taken in a shuffled order, from this number on.
        seed: of that order.
    """
    if isinstance(source, Tensor):
        return [window(source, length, rng) for rng in rngs]
    return [source.at(first + index, seed).tokens.long() for index in range(len(rngs))]


def draw_answered(
    source: Source, prompt_length: int, length: int, rngs: Sequence[torch.Generator], first: int, seed: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw sequences with the answers that are there; of a text, what comes after ``prompt_length`` ids counts as the answer.

    Args:
        source, rngs, first, seed: as in `draw_prompts`.
        prompt_length: ids of a text before the answer.
        length: ``S``; conversations are padded to it.

    Returns:
        tokens: int64 ``[len(rngs), S]``.
        supervised: bool ``[len(rngs), S]``, False on padding.
        documents: int64 ``[len(rngs), S]``, see `Sample`, -1 on padding; None where nothing is packed.
    """
    documents = torch.full((len(rngs), length), -1)
    packed = False
    tokens = torch.zeros(len(rngs), length, dtype=torch.long)
    supervised = torch.zeros(len(rngs), length, dtype=torch.bool)
    for row, rng in enumerate(rngs):
        if isinstance(source, Tensor):
            tokens[row] = window(source, length, rng)
            supervised[row, prompt_length:] = True
        else:
            sample = source.at(first + row, seed)
            tokens[row, : len(sample.tokens)] = sample.tokens
            supervised[row, : len(sample.tokens)] = sample.supervised
            if sample.documents is not None:
                packed = True
                documents[row, : len(sample.tokens)] = sample.documents
    return tokens, supervised, documents if packed else None


def digest(source: Source) -> str:
    """Return a hash of all tokens, of which of them are answers, and of how they are packed."""
    found = hashlib.sha256()
    parts = [source] if isinstance(source, Tensor) else [p for s in source.samples for p in s if p is not None]
    for part in parts:
        if not isinstance(source, Tensor):
            found.update(f"{len(part)} ".encode())
        found.update(part.contiguous().numpy().data)
    return found.hexdigest()


@lru_cache(maxsize=4)
def _order(count: int, seed: int, turn: int) -> list[int]:
    return torch.randperm(count, generator=generator(seed, "order", turn)).tolist()


def _is_text(content: bytes) -> bool:
    try:
        return "\0" not in content.decode()
    except UnicodeDecodeError:
        return False
