"""The corpus, its split, and the numbers drawn for a sample."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import data
from config import ConfigError


def test_bytes_survive_encoding() -> None:
    text = bytes(range(256))
    tokens = data.encode(text)
    assert int(tokens.min()) > data.MASK_ID
    assert int(tokens.max()) == data.VOCAB_SIZE - 1
    assert data.decode(tokens) == text


def test_the_parts_are_whole_files_split_by_name(tmp_path: Path) -> None:
    names = [f"module_{i}.txt" for i in range(64)]
    for name in names:
        (tmp_path / name).write_text(f"<{name}>")
    (tmp_path / "picture").write_bytes(b"\x89PNG\x00\xff")
    corpus = data.load_corpus(tmp_path)
    assert corpus.held_out.decode() == "".join(f"<{n}>" for n in sorted(names) if data.is_held_out(n))
    assert corpus.train.decode() == "".join(f"<{n}>" for n in sorted(names) if not data.is_held_out(n))


def test_of_few_files_the_end_of_the_text_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "book").write_text("x" * 150 + "y" * 10)
    corpus = data.load_corpus(tmp_path)
    assert corpus == data.Corpus(b"x" * 150, b"y" * 10)


def test_the_standard_library_is_the_text_without_a_folder() -> None:
    corpus = data.load_corpus()
    assert b"class Thread" in corpus.train + corpus.held_out
    assert 10 * len(corpus.held_out) < len(corpus.train)


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "picture").write_bytes(b"\x89PNG\x00\xff")
    with pytest.raises(ConfigError, match="no text"):
        data.load_corpus(tmp_path)
    with pytest.raises(ConfigError, match="no folder"):
        data.load_corpus(tmp_path / "absent")


def test_a_generator_follows_from_its_key_alone() -> None:
    draws = [
        torch.rand(3, generator=data.generator(*key)).tolist() for key in ((0, 1, 2), (0, 1, 2), (0, 12), (0, 1, 3))
    ]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]
    assert draws[0] != draws[3]


def test_a_window_is_a_piece_of_the_text() -> None:
    text = torch.arange(50, dtype=torch.int32)
    tokens = data.window(text, 10, data.generator("x"))
    start = int(tokens[0])
    assert tokens.tolist() == list(range(start, start + 10))
    with pytest.raises(ValueError, match="50 tokens"):
        data.window(text, 51, data.generator("x"))
