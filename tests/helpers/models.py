"""Untrained language models of transformers, small enough for a test."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def tiny_model(architecture: str, **options: Any) -> Any:
    """Make a causal language model of width 32, the same each time: ``architecture`` is the beginning of transformers' names, such as "Qwen3"."""
    transformers = pytest.importorskip("transformers", reason="the model is one of transformers")
    config = getattr(transformers, f"{architecture}Config")(
        **{
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "initializer_range": 0.2,
            "bos_token_id": None,
            **options,
        }
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{architecture}ForCausalLM")(config)
