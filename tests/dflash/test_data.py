"""The corpus, its split, and the numbers drawn for a sample."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import data


def test_bytes_survive_encoding() -> None:
    text = bytes(range(256))
    tokens = data.encode(text)
    assert int(tokens.min()) > data.MASK_ID
    assert int(tokens.max()) == data.VOCAB_SIZE - 1
    assert data.decode(tokens) == text


def test_the_parts_are_whole_files_split_by_name(tmp_path: Path) -> None:
    names = [f"module_{i}.py" for i in range(64)]
    for name in names:
        (tmp_path / name).write_text(f"<{name}>")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_x.py").write_text("left out")
    corpus = data.load_corpus(tmp_path)
    held_out = "".join(f"<{n}>" for n in sorted(names) if data.is_held_out(n))
    train = "".join(f"<{n}>" for n in sorted(names) if not data.is_held_out(n))
    assert bytes(corpus.held_out.tolist()).decode() == held_out
    assert bytes(corpus.train.tolist()).decode() == train


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no text"):
        data.load_corpus(tmp_path)


def test_a_generator_follows_from_its_key_alone() -> None:
    draws = [
        torch.rand(3, generator=data.generator(*key)).tolist() for key in ((0, 1, 2), (0, 1, 2), (0, 12), (0, 1, 3))
    ]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]
    assert draws[0] != draws[3]


def test_a_window_is_a_piece_of_the_text() -> None:
    text = torch.arange(50, dtype=torch.uint8)
    tokens = data.window(text, 10, data.generator("x"))
    start = int(tokens[0]) - data.BYTE_OFFSET
    assert tokens.tolist() == [data.BYTE_OFFSET + start + i for i in range(10)]
    with pytest.raises(ValueError, match="50 bytes"):
        data.window(text, 51, data.generator("x"))
