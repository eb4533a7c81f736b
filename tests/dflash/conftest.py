"""The example's modules are plain files beside each other; its tests import them the way its programs do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "dflash"
sys.path.insert(0, str(EXAMPLE))


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an untrained target of 5 layers, width 32, over bytes."""
    transformers = pytest.importorskip("transformers", reason="the example's target is a transformers model")
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("target")
    config = transformers.Qwen3Config(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=0,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder
