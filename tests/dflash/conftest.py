"""The example's modules are plain files beside each other; its tests import them the way its programs do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.models import tiny_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "dflash"
sys.path.insert(0, str(EXAMPLE))


@pytest.fixture(scope="module", autouse=True)
def nothing_compiled() -> None:
    """Forget what other files' tests compiled: functions of the example have a limit of graphs, and each file its own shapes."""
    torch.compiler.reset()


def write_tiny_target(folder: Path) -> None:
    """Write an untrained target of 5 layers, width 32, over bytes."""
    tiny_model(
        "Qwen3", vocab_size=258, head_dim=8, max_position_embeddings=256, tie_word_embeddings=True, eos_token_id=0
    ).save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the target that `write_tiny_target` writes."""
    folder = tmp_path_factory.mktemp("target")
    write_tiny_target(folder)
    return folder


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of text to train on."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "counting.txt").write_text(" ".join(str(i) for i in range(2000)))
    return folder
