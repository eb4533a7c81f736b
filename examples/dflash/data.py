"""Text as bytes: the corpus, its held-out part, and the work of every training step.

The corpus is the source code of Python's own standard library: it is on every machine that can run this example, so
nothing is downloaded. A byte is a token; two ids below the bytes are the end of text and the drafter's mask token.
"""

from __future__ import annotations

import hashlib
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

EOS_ID = 0
"""Id of the end of text."""

MASK_ID = 1
"""Id of the mask token that fills a draft block; the target never sees it in its training text."""

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

_HELD_OUT_ONE_IN = 16


@dataclass(frozen=True)
class Corpus:
    """Two disjoint texts, each a 1-D uint8 tensor of the bytes of whole files, one after the other."""

    train: Tensor
    held_out: Tensor


def is_held_out(relative_name: str) -> bool:
    """Tell whether a file is kept for evaluation, from its name alone, so that the split is the same on every Python."""
    return zlib.crc32(relative_name.encode()) % _HELD_OUT_ONE_IN == 0


def load_corpus(folder: Path | None = None) -> Corpus:
    """Read every ``*.py`` below ``folder`` (default: the standard library) and split the files.

    Raises:
        ValueError: if the folder does not give text to both parts.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not _LEFT_OUT.intersection(relative.parts):
            parts[is_held_out(relative.as_posix())].append(path.read_bytes())
    train, held_out = (b"".join(parts[flag]) for flag in (False, True))
    if not train or not held_out:
        raise ValueError(f"no text to train and evaluate on below {root}: it needs *.py files, about 16 or more")
    return Corpus(_bytes_tensor(train), _bytes_tensor(held_out))


def encode(text: bytes) -> Tensor:
    """Return the token ids of ``text``, int64 ``[len(text)]``."""
    return _bytes_tensor(text).long() + BYTE_OFFSET


def decode(tokens: Tensor) -> bytes:
    """Return the bytes of token ids ``[n]``; the end of text and the mask token have none."""
    return bytes(t - BYTE_OFFSET for t in tokens.tolist() if t >= BYTE_OFFSET)


def generator(*key: int | str) -> torch.Generator:
    """Return a CPU generator seeded by ``key`` alone: equal keys draw equal numbers, in any thread and at any time."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def window(text: Tensor, length: int, rng: torch.Generator) -> Tensor:
    """Cut ``length`` consecutive bytes at a place drawn from ``rng``; return token ids int64 ``[length]``.

    Raises:
        ValueError: if ``text`` is shorter than ``length`` bytes.
    """
    if len(text) < length:
        raise ValueError(f"the text has {len(text)} bytes, a window needs {length}")
    start = int(torch.randint(len(text) - length + 1, (), generator=rng))
    return text[start : start + length].long() + BYTE_OFFSET


def _bytes_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
