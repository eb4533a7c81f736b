"""A dry run estimates from the target's configuration alone, and its figures are those of the real modules."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the example's target is a transformers model")
pytest.importorskip("rich", reason="the example's display")
pytest.importorskip("matplotlib", reason="the example's plots")

import attention
import demo
import estimate
import optimizer
from command import command_line
from config import Config, ConfigError
from drafter import Drafter, DrafterShape
from target import Target, read_config, shape_of

LARGE = {
    "model_type": "qwen3",
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": False,
}
EIGHT = LARGE | {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def estimated(folder: Path, model: dict[str, Any], *arguments: str) -> estimate.Estimate:
    (folder / "config.json").write_text(json.dumps(model))
    command = command_line([*arguments, "--target", str(folder), "--dry-run"])
    assert command.estimate_for is not None
    return estimate.estimate(command.config, rate=command.estimate_for)


def test_the_large_drafter_has_its_known_figures(tmp_path: Path) -> None:
    found = estimated(tmp_path, LARGE, "--config", "qwen3.6-27b", "--device", ",".join(f"cuda:{i}" for i in range(8)))
    assert found.trainable_parameters == pytest.approx(1.73e9, rel=0.001)
    state = sum(
        size for name, size in found.drafter_memory.items() if name in ("weights, float32", "gradients", "optimizer")
    )
    assert state == 16 * found.trainable_parameters == pytest.approx(28e9, rel=0.02)
    assert found.drafter_memory["embedding and head"] == pytest.approx(5.1e9, rel=0.01)
    assert found.whole_logits == pytest.approx(8.1e9 * 15 / 16, rel=0.01)  # no logits of the anchor
    assert found.chunk_logits == pytest.approx(0.51e9 * 15 / 16, rel=0.01)
    assert found.token_bytes == 60 * 1024
    assert found.traffic == pytest.approx(0.5e9, rel=0.05)
    assert found.shapes["features"] == (1, 4096, 5 * 5120)
    target, drafter = sum(found.target_memory.values()), sum(found.drafter_memory.values())
    assert found.device_memory == {f"cuda:{i}": target if i < 5 else drafter for i in range(8)}


def test_the_drafter_of_eight_billion_has_the_published_size(tmp_path: Path) -> None:
    found = estimated(tmp_path, EIGHT, "--config", "qwen3-8b", "--device", "cuda:0")
    assert found.trainable_parameters == pytest.approx(1.05e9, rel=0.01)
    assert found.target_parameters == pytest.approx(8.19e9, rel=0.01)
    assert "dense mask" not in found.drafter_memory
    dense = estimated(tmp_path, EIGHT, "--config", "qwen3-8b", "--device", "cuda:0", "--attention", "dense")
    sequences, context, _ = dense.shapes["features"]
    _, rows, _ = dense.shapes["blocks, rows of all anchors"]
    assert dense.drafter_memory["dense mask"] == sequences * rows * (context + rows)
    assert dense.device_memory["cuda:0"] - found.device_memory["cuda:0"] == 3 * dense.drafter_memory["dense mask"]


def test_parameters_and_traffic_are_those_of_the_loaded_models(tiny_target: Path) -> None:
    config = Config(device="cpu", target=tiny_target, taps=(0, 2), layers=1)
    found = estimate.estimate(config)
    target = Target(tiny_target, (0, 2), torch.device("cpu"))
    assert found.target_parameters == sum(p.numel() for p in target.model.parameters())
    vocabulary = target.vocabulary(torch.device("cpu"))
    assert vocabulary.head is vocabulary.embedding  # tied, and not copied twice
    assert found.vocabulary_parameters == vocabulary.head.numel()
    features = target.forward(torch.zeros(1, 3, dtype=torch.long))
    assert 3 * found.token_bytes == sum(f.nbytes for f in features)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_optimizers_memory_is_that_of_a_real_one(name: optimizer.OptimizerName) -> None:
    drafter = Drafter(DrafterShape(32, 48, 2, 4, 2, 8, 2, 1e4, 1e-6))
    for parameter in drafter.parameters():
        parameter.grad = torch.ones_like(parameter)
    steps = optimizer.build(drafter, name, lr=0.1, muon_lr=0.1, steps=2, warmup_ratio=0.5, clip=1.0)
    steps.step()
    kept = sum(
        value.numel()
        for one in steps._optimizers
        for state in one.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.numel() > 1
    )
    trainable = sum(p.numel() for p in drafter.parameters())
    matrices = sum(p.numel() for p in drafter.parameters() if p.ndim == 2)
    assert estimate.optimizer_elements(name, trainable, matrices) == kept


def test_the_activations_are_about_what_a_backward_keeps() -> None:
    length, blocks, block_size = 48, 8, 4
    shape = DrafterShape(64, 192, 3, 4, 2, 16, 3, 1e4, 1e-6)
    drafter = Drafter(shape)
    anchors = torch.arange(4, 44, 5).unsqueeze(0)
    mask = attention.dense_mask(attention.Layout(anchors, torch.ones(1, blocks, dtype=torch.bool), length, block_size))
    weights = {p.untyped_storage().data_ptr() for p in drafter.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    features, rows = torch.randn(1, length, 3 * 64), torch.randn(1, blocks * block_size, 64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        context = drafter.context(features, torch.arange(length).unsqueeze(0))
        drafter.blocks(rows, torch.arange(blocks * block_size).unsqueeze(0), context, {attention.FULL: mask})
    estimated = 4 * estimate.activation_elements(shape, length, blocks * block_size)
    assert 0.6 < estimated / sum(kept.values()) < 1.3


def test_the_cache_is_as_large_as_the_real_one(tiny_target: Path) -> None:
    target = Target(tiny_target, (0,), torch.device("cpu"))
    cache = target.new_cache()
    target.forward(torch.zeros(1, 9, dtype=torch.long), cache)
    real = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    config = read_config(tiny_target)
    assert estimate.cache_elements(config, shape_of(config), 9) == real


def test_linear_attention_keeps_nothing_for_each_token_and_a_window_only_itself() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        num_hidden_layers=3, layer_types=["full_attention", "sliding_attention", "full_attention"]
    )
    config.sliding_window = 4
    config.layer_types[2] = "linear_attention"
    config.num_attention_heads = config.num_key_value_heads = 1
    config.head_dim = 1
    assert estimate.cache_elements(config, shape_of(config), 10) == 2 * (10 + 4)


def test_a_drafter_beside_the_first_target_shares_its_vocabulary(tiny_target: Path) -> None:
    config = Config(device="cuda:0,cuda:1", target=tiny_target, targets=1, drafters=2)
    found = estimate.estimate(config)
    drafter = sum(found.drafter_memory.values())
    assert found.device_memory["cuda:1"] == drafter
    shared = drafter - found.drafter_memory["embedding and head"]
    assert found.device_memory["cuda:0"] == sum(found.target_memory.values()) + shared


def test_evaluating_while_training_goes_on_takes_memory_beside_the_first_target_and_the_first_drafter(
    tiny_target: Path,
) -> None:
    config = Config(device=",".join(f"cuda:{i}" for i in range(4)), target=tiny_target, targets=2, drafters=2)
    plain, evaluating = estimate.estimate(config), estimate.estimate(replace(config, eval_every=45))
    assert plain.evaluation_memory == {}
    more = {device: size - plain.device_memory[device] for device, size in evaluating.device_memory.items()}
    weights = 4 * plain.trainable_parameters
    assert (more["cuda:2"], more["cuda:1"], more["cuda:3"]) == (3 * weights, 0, 0)
    assert more["cuda:0"] > weights
    assert sum(more.values()) == sum(evaluating.evaluation_memory.values())


def test_a_dry_run_shows_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(EIGHT))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "Run", None)
    arguments = ["--config", "qwen3-8b", "--target", "model", "--device", "cuda", "--dry-run"]
    assert demo.main(arguments) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for figure in ("1,048.63", "8,190.74", "18.67 GB", "412.88 MB/s at 2800 tok/s"):
        assert figure in shown, figure
    assert demo.main([*arguments, "1000"]) == 0
    assert "147.46 MB/s at 1000 tok/s" in " ".join(capsys.readouterr().out.split())
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("--device tpu", "'tpu' does not exist"),
        ("--mask-token-id 258", "mask_token_id is 258"),
        ("--taps 0,5", "0 to 4"),
        ("--draft-heads 3", "multiple"),
        ("--response-length 129", "prompt_length + response_length is 257"),
        ("--device cuda:0,cuda:1,cuda:0,cuda:1,cuda:0,cpu", "drafters onto cpu and cuda"),
        ("--dry-run 0", "0 tokens a second"),
        ("--dry-run fast", "--dry-run"),
        ("--steps 0", "steps is 0"),
    ],
)
def test_a_dry_run_refuses_what_a_run_would(
    tiny_target: Path, wrong: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--dry-run", "--target", str(tiny_target), "--taps", "0,2", *wrong.split()]) == 2
    assert says in capsys.readouterr().err


def test_a_configuration_of_no_language_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EIGHT | {"model_type": "vit"}))
    with pytest.raises(ConfigError, match="no causal language model"):
        estimate.estimate(replace(Config(), target=tmp_path, device="cpu"))
