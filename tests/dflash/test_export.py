"""A saved drafter is a published checkpoint in names and layout, drafts the same when read back, and is never half there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="the example's target is a transformers model")

from safetensors.torch import load_file

import export
import run_folder
from config import Config
from drafter import Drafter, new_drafter
from speculative import DFlashProposer
from target import Target

CPU = torch.device("cpu")
PROMPT = torch.randint(2, 258, (20,), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return Target(tiny_target, (0, 2, 3), CPU)


@pytest.fixture(scope="module")
def drafter(target: Target) -> Drafter:
    return new_drafter(Config(), target.shape, 3, CPU)


@pytest.fixture
def folder(tmp_path: Path, drafter: Drafter, target: Target) -> Iterator[Path]:
    export.save(tmp_path / "drafter", drafter, target, 8, 5)
    yield tmp_path / "drafter"
    assert {p.name for p in (tmp_path / "drafter").glob("[!.]*")} == {"config.json", "model.safetensors"}


def drafts(drafter: Drafter, target: Target) -> list[Tensor]:
    """Return drafts and block outputs of two cycles, the second with kept context."""
    proposer = DFlashProposer(drafter, target, 8)
    features = target.forward(PROMPT.unsqueeze(0)).tapped
    return [
        proposer.propose(PROMPT[:13].tolist(), features[:, :12]),
        proposer.propose(PROMPT[:17].tolist(), features[:, 12:16]),
    ]


def test_save_and_load_give_the_same_weights_and_the_same_drafts(
    folder: Path, drafter: Drafter, target: Target
) -> None:
    loaded = export.load(folder, CPU)
    assert (loaded.block_size, loaded.taps, loaded.mask_id, loaded.step) == (8, (0, 2, 3), 1, 5)
    assert loaded.drafter.shape == drafter.shape
    for name, weight in drafter.state_dict().items():
        assert torch.equal(loaded.drafter.state_dict()[name], weight)
    for before, after in zip(drafts(drafter, target), drafts(loaded.drafter, target), strict=True):
        assert torch.equal(before, after)


def test_saving_what_was_loaded_writes_the_same_checkpoint(folder: Path, target: Target, tmp_path: Path) -> None:
    loaded = export.load(folder, CPU)
    export.save(tmp_path / "again", loaded.drafter, target, loaded.block_size, loaded.step)
    assert (tmp_path / "again" / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    again, before = (load_file(place / "model.safetensors") for place in (tmp_path / "again", folder))
    assert again.keys() == before.keys()
    assert all(torch.equal(again[name], before[name]) for name in before)


def test_names_are_those_of_published_checkpoints(folder: Path) -> None:
    per_layer = {"input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"} | {
        f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    }
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    expected |= {f"layers.{i}.{name}.weight" for i in range(2) for name in per_layer}
    weights = load_file(folder / "model.safetensors")
    assert set(weights) == expected
    assert weights["fc.weight"].shape == (32, 3 * 32)
    assert weights["layers.0.self_attn.k_norm.weight"].shape == (8,)


def test_the_configuration_has_the_published_fields(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    expected = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 8,
        "num_target_layers": 5,
        "num_hidden_layers": 2,
        "dflash_config": {"block_size": 8, "mask_token_id": 1, "target_layer_ids": [0, 2, 3]},
        "hidden_size": 32,
        "layer_types": ["full_attention", "full_attention"],
        "sliding_window": None,
        "use_sliding_window": False,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "dtype": "float32",
        "vocab_size": 258,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
    }
    assert {name: config[name] for name in expected} == expected
    assert "is_causal" not in config


@pytest.mark.parametrize("when", ["writing", "renaming"])
def test_a_save_that_fails_leaves_what_was_saved(
    folder: Path, drafter: Drafter, target: Target, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def half(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    def fail(path: Path, onto: Path) -> None:
        raise KeyboardInterrupt

    before = (folder / "model.safetensors").read_bytes()
    with monkeypatch.context() as patch:
        if when == "writing":
            patch.setattr(run_folder, "save_file", half)
        else:
            patch.setattr(Path, "replace", fail)
        with pytest.raises(KeyboardInterrupt):
            export.save(folder, drafter, target, 8, 6)
    assert (folder / "model.safetensors").read_bytes() == before
    assert export.load(folder, CPU).step == 5
    export.save(folder, drafter, target, 8, 7)
    assert export.step_of(folder) == 7
