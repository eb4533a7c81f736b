"""The drafter on disk, in the layout of published DFlash checkpoints: ``config.json`` and ``model.safetensors``.

Names of weights are those of `Drafter`'s parameters, without a prefix; embedding and head stay with the target.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from drafter import Drafter, DrafterShape
from run_folder import write_json, write_tensors
from target import Target

WEIGHTS = "model.safetensors"
CONFIG = "config.json"


@dataclass(frozen=True)
class Exported:
    """A drafter read from disk, and what drafting with it takes.

    Attributes:
        drafter: the model.
        block_size: ``B``.
        taps: tapped layers of its target.
        mask_id: the target's mask token.
        step: training steps behind the weights.
    """

    drafter: Drafter
    block_size: int
    taps: tuple[int, ...]
    mask_id: int
    step: int


def checkpoint_config(drafter: Drafter, target: Target, block_size: int) -> dict[str, Any]:
    """Return the ``config.json`` of a published checkpoint, for this drafter."""
    shape = drafter.shape
    eos = target.language.eos_ids
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": block_size,
        "num_target_layers": target.shape.layers,
        "dflash_config": {"mask_token_id": target.language.mask_id, "target_layer_ids": list(target.taps)},
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": getattr(target.model.config, "max_position_embeddings", None),
        "vocab_size": target.language.vocab_size,
        "layer_types": ["full_attention"] * shape.layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": shape.layers,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": target.shape.initializer_range,
        "dtype": "float32",
        "bos_token_id": getattr(target.model.config, "bos_token_id", None),
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
    }


def save(folder: Path, drafter: Drafter, target: Target, block_size: int, step: int) -> None:
    """Write the drafter; an earlier one in ``folder`` stays whole until the new one takes its place.

    The configuration does not change within a run, so that the rename of the weights is the moment of change.
    """
    folder.mkdir(exist_ok=True)
    write_json(folder / CONFIG, checkpoint_config(drafter, target, block_size))
    write_tensors(folder / WEIGHTS, drafter.state_dict(), {"format": "pt", "step": str(step)})


def load(folder: Path, device: torch.device) -> Exported:
    """Read a drafter.

    Raises:
        ValueError: if the weights are not those that the configuration asks for.
    """
    config = json.loads((folder / CONFIG).read_text())
    drafter = Drafter(
        DrafterShape(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            taps=len(config["dflash_config"]["target_layer_ids"]),
            rope_theta=config["rope_theta"],
            rms_norm_eps=config["rms_norm_eps"],
        )
    )
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        step = int((file.metadata() or {}).get("step", 0))
    try:
        drafter.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"{folder / WEIGHTS} does not fit {folder / CONFIG}: {error}") from error
    return Exported(
        drafter.to(device),
        config["block_size"],
        tuple(config["dflash_config"]["target_layer_ids"]),
        config["dflash_config"]["mask_token_id"],
        step,
    )


def step_of(folder: Path) -> int:
    """Return the training steps behind the weights in ``folder``."""
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        return int((file.metadata() or {}).get("step", 0))
