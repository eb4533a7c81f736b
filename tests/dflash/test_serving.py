"""An export means to vLLM and SGLang what it means here, and a damaged one is refused before anything runs."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="the example's target is a transformers model")

from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

import export
import serving
from attention import FULL, SLIDING
from config import Config, ConfigError
from drafter import Drafter, KeysValues, new_drafter
from target import Target

CPU = torch.device("cpu")
BLOCK, WINDOW = 4, 6
KINDS: dict[str, Any] = {"full": (FULL, FULL), "sliding": (SLIDING, SLIDING), "mixed": (SLIDING, FULL)}
OWN = Config(draft_heads=6, draft_kv_heads=3, draft_head_dim=10, draft_intermediate_size=40)


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return Target(tiny_target, (0, 2, 3), CPU)


def drafter_of(kinds: str, target: Target) -> Drafter:
    config = replace(OWN, layer_types=KINDS[kinds])
    if kinds != "full":
        config = replace(config, sliding_window=WINDOW)
    drafter = new_drafter(config, target.shape, 3, CPU)
    rng = torch.Generator().manual_seed(7)
    with torch.no_grad():  # so that a norm that is skipped shows
        for parameter in drafter.parameters():
            parameter.mul_(4).add_(torch.randn(parameter.shape, generator=rng), alpha=0.1)
    return drafter


@pytest.fixture(params=list(KINDS))
def kinds(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def drafter(kinds: str, target: Target) -> Drafter:
    return drafter_of(kinds, target)


@pytest.fixture
def folder(tmp_path: Path, drafter: Drafter, target: Target) -> Path:
    export.save(tmp_path / "drafter", drafter, target, BLOCK, 5)
    return tmp_path / "drafter"


def edit(folder: Path, **changes: Any) -> None:
    """Change fields of the configuration; those that become ... are taken out."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


class Server:
    """A drafter run the way the servers do, from the folder alone: layer by layer, with what transformers makes of the configuration.

    Keys of the context go into a cache by position; a layer that is `AttentionType.DECODER` in SGLang looks ``sliding_window - 1``
    positions back and never ahead; one that is `ENCODER_ONLY` sees all there is.
    """

    def __init__(self, folder: Path) -> None:
        self.config = AutoConfig.from_pretrained(folder, local_files_only=True)
        self.weights = {name: weight.float() for name, weight in load_file(folder / "model.safetensors").items()}
        self.rotary = Qwen3RotaryEmbedding(self.config)

    def norm(self, rows: Tensor, name: str) -> Tensor:
        return nn.functional.rms_norm(rows, rows.shape[-1:], self.weights[f"{name}.weight"], self.config.rms_norm_eps)

    def project(self, rows: Tensor, name: str) -> Tensor:
        return rows @ self.weights[f"{name}.weight"].T

    def heads(self, rows: Tensor, name: str) -> Tensor:
        return self.project(rows, name).view(len(rows), -1, self.config.head_dim).transpose(0, 1).unsqueeze(0)

    def rotated(self, heads: Tensor, at: Tensor) -> Tensor:
        cos, sin = self.rotary(heads, at.unsqueeze(0))
        return apply_rotary_pos_emb(heads, heads, cos, sin)[0]

    def draft(self, features: Tensor, embeddings: Tensor, anchor: int) -> Tensor:
        """Return the outputs ``[B, D]`` of a block ``[B, D]`` after features ``[anchor, taps * D]``."""
        context = self.norm(self.project(features, "fc"), "hidden_norm")
        before, own = torch.arange(anchor), torch.arange(anchor, anchor + len(embeddings))
        at, rows = torch.cat((before, own)), embeddings
        for i, kind in enumerate(self.config.layer_types):
            layer = f"layers.{i}"
            inside = self.norm(rows, f"{layer}.input_layernorm")
            attention = f"{layer}.self_attn"
            query = self.rotated(self.norm(self.heads(inside, f"{attention}.q_proj"), f"{attention}.q_norm"), own)
            both = torch.cat((context, inside))
            key = self.rotated(self.norm(self.heads(both, f"{attention}.k_proj"), f"{attention}.k_norm"), at)
            value = self.heads(both, f"{attention}.v_proj")
            groups = self.config.num_attention_heads // self.config.num_key_value_heads
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
            scores = query @ key.transpose(-1, -2) / math.sqrt(self.config.head_dim)
            if kind == "sliding_attention":
                window_left = self.config.sliding_window - 1
                back = own.unsqueeze(1) - at
                scores = scores.masked_fill((back < 0) | (back > window_left), -torch.inf)
            mixed = (scores.softmax(-1) @ value)[0].transpose(0, 1).flatten(1)
            rows = rows + self.project(mixed, f"{attention}.o_proj")
            inside = self.norm(rows, f"{layer}.post_attention_layernorm")
            gate, up = (self.project(inside, f"{layer}.mlp.{name}_proj") for name in ("gate", "up"))
            rows = rows + self.project(nn.functional.silu(gate) * up, f"{layer}.mlp.down_proj")
        return self.norm(rows, "norm")


def test_a_server_computes_what_the_drafter_does(folder: Path, drafter: Drafter) -> None:
    rng = torch.Generator().manual_seed(1)
    anchor = 3 * WINDOW
    features, embeddings = torch.randn(anchor, 3 * 32, generator=rng), torch.randn(BLOCK, 32, generator=rng)
    served = Server(folder).draft(features, embeddings, anchor)
    context: list[KeysValues] = []
    with torch.no_grad():
        context = drafter.keep(context, drafter.context(features.unsqueeze(0), torch.arange(anchor).unsqueeze(0)))
        drafted = drafter.draft(embeddings.unsqueeze(0), anchor, context)[0]
    torch.testing.assert_close(drafted, served, rtol=1e-4, atol=1e-4)


def test_what_is_read_is_what_was_written(folder: Path, drafter: Drafter, target: Target) -> None:
    served = serving.read(folder)
    assert served == serving.Served(drafter.shape, BLOCK, (0, 2, 3), 1, 5, 258, torch.float32)
    assert serving.weight_shapes(served) == {name: tuple(w.shape) for name, w in drafter.state_dict().items()}
    assert export.check(folder, target, drafter, BLOCK) == 1.0


def test_kinds_of_layers_are_written_as_readers_look_for_them(folder: Path, kinds: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    slides = kinds != "full"
    assert config["layer_types"] == list(KINDS[kinds])
    assert (config["use_sliding_window"], config["sliding_window"]) == (slides, WINDOW if slides else None)
    # It holds for all layers or for none.
    assert config.get("is_causal") == {"sliding": True}.get(kinds)
    assert AutoConfig.from_pretrained(folder).sliding_window == (WINDOW if slides else None)


def test_a_published_configuration_with_its_fields_in_one_place_is_read(folder: Path, drafter: Drafter) -> None:
    """Older checkpoints have the block size at the top and rope_theta alone; newer ones have both inside."""
    inside = json.loads((folder / "config.json").read_text())["dflash_config"]
    edit(folder, dflash_config={n: v for n, v in inside.items() if n != "block_size"}, rope_parameters=...)
    assert serving.read(folder).block_size == BLOCK
    edit(folder, dflash_config=inside, block_size=..., rope_theta=..., rope_parameters={"rope_theta": 10000.0})
    assert serving.read(folder).shape == drafter.shape
    with pytest.raises(ConfigError, match="block_size must stand"):
        serving.check_exported(folder)


# The fields of z-lab/Qwen3-8B-DFlash-b16, and those of SpecForge's drafter of Qwen3.6-27B where they differ.
QWEN3_8B: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "bos_token_id": 151643,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "layer_types": [FULL] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN36_27B: dict[str, Any] = QWEN3_8B | {
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "layer_types": [SLIDING] * 4 + [FULL],
    "num_target_layers": 64,
    "rope_theta": 10000000,
    "sliding_window": 2048,
    "use_sliding_window": True,
    "vocab_size": 248320,
}


@pytest.mark.parametrize(
    ("published", "taps", "mask_id", "window", "billions"),
    [
        (QWEN3_8B, (1, 9, 17, 25, 33), 151669, None, 1.05),
        (QWEN36_27B, (1, 16, 31, 46, 61), 248070, 2048, 1.73),
    ],
    ids=["qwen3-8b", "qwen3.6-27b"],
)
def test_published_configurations_are_read(
    tmp_path: Path, published: dict[str, Any], taps: tuple[int, ...], mask_id: int, window: int | None, billions: float
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published))
    served = serving.read(tmp_path)
    assert (served.block_size, served.taps, served.mask_id, served.dtype) == (16, taps, mask_id, torch.bfloat16)
    shape = served.shape
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (5, 32, 8, 128)
    assert (shape.rope_theta, shape.sliding_window) == (published["rope_theta"], window)
    assert shape.layer_types == tuple(published["layer_types"])
    weights = sum(math.prod(size) for size in serving.weight_shapes(served).values())
    assert round(weights / 1e9, 2) == billions


def dflash(**changes: Any) -> dict[str, Any]:
    return {"block_size": BLOCK, "mask_token_id": 1, "target_layer_ids": [0, 2, 3]} | changes


@pytest.mark.parametrize("kinds", ["mixed"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures"),
        ({"model_type": "llama"}, "model_type"),
        ({"dflash_config": ...}, "dflash_config"),
        ({"dflash_config": dflash(target_layer_ids=[0, 2, 5])}, "target_layer_ids"),
        ({"dflash_config": dflash(target_layer_ids=[])}, "target_layer_ids"),
        ({"dflash_config": dflash(mask_token_id=258)}, "mask_token_id"),
        ({"dflash_config": dflash(mask_token_id=None)}, "mask_token_id"),
        ({"dflash_config": dflash(block_size=1)}, "block_size"),
        ({"dflash_config": dflash(conv_kernel_size=2)}, "conv_kernel_size"),
        ({"dflash_config": dflash(causal=True)}, "causal"),
        ({"is_causal": True}, "is_causal"),
        ({"is_causal": False}, "is_causal"),
        ({"use_sliding_window": False}, "sliding_window"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention", "chunked_attention"]}, "layer_types"),
        ({"rope_theta": 1e6}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"dtype": ...}, "dtype"),
        ({"num_target_layers": "5"}, "num_target_layers"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"draft_vocab_size": 100}, "draft_vocab_size"),
        ({"num_hidden_layers": 3}, "layer_types"),
        ({"num_key_value_heads": 4}, "key/value"),
    ],
    ids=str,
)
def test_a_configuration_that_servers_would_refuse_or_misread_is_refused(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    edit(folder, **changes)
    with pytest.raises(ConfigError, match=message):
        export.load(folder, CPU)


def rename(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"model.{name}": weight for name, weight in weights.items()}


def lose(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight for name, weight in weights.items() if name != "hidden_norm.weight"}


def reshape(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return weights | {"fc.weight": weights["fc.weight"][:, :-32].contiguous()}


def halve(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return weights | {"norm.weight": weights["norm.weight"].bfloat16()}


def spoil(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return weights | {"norm.weight": weights["norm.weight"].index_fill(0, torch.tensor([3]), math.nan)}


@pytest.mark.parametrize("kinds", ["mixed"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (rename, "is missing"),
        (rename, "more"),
        (lose, "hidden_norm.weight is missing"),
        (reshape, r"fc.weight is \(32, 64\)"),
        (halve, "bfloat16"),
        (spoil, "no number"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    folder: Path, damage: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str
) -> None:
    save_file(damage(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    with pytest.raises(ConfigError, match=f"does not fit.*{message}"):
        export.load(folder, CPU)


@pytest.mark.parametrize("kinds", ["mixed"])
@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"half"])
def test_files_that_are_not_whole_are_refused(folder: Path, file: str, content: bytes | None) -> None:
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read"):
        export.load(folder, CPU)


@pytest.mark.parametrize("kinds", ["mixed"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 3}, "drafts other tokens"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "drafts other tokens"),
        ({"rope_theta": 50.0, "rope_parameters": {"rope_theta": 50.0, "rope_type": "default"}}, "drafts other tokens"),
        ({"dflash_config": dflash(block_size=8), "block_size": 8}, "block_size"),
        ({"dflash_config": dflash(target_layer_ids=[0, 1, 3])}, "target_layer_ids"),
        ({"dflash_config": dflash(mask_token_id=2)}, "mask_token_id"),
        ({"block_size": 8}, "block_size must stand"),
        ({"rope_theta": ...}, "rope_theta must stand"),
        ({"num_target_layers": 6}, "number of layers"),
        ({"vocab_size": 300}, "vocabulary"),
    ],
    ids=str,
)
def test_the_check_finds_an_export_that_says_something_else_than_the_model(
    folder: Path, drafter: Drafter, target: Target, changes: dict[str, Any], message: str
) -> None:
    edit(folder, **changes)
    with pytest.raises(ConfigError, match=message):
        export.check(folder, target, drafter, BLOCK)


@pytest.mark.parametrize("kinds", ["mixed"])
def test_the_check_finds_weights_of_another_model(folder: Path, drafter: Drafter, target: Target) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["fc.weight"] = weights["fc.weight"].flip(0).contiguous()
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="drafts other tokens"):
        export.check(folder, target, drafter, BLOCK)


def test_a_run_is_exported_and_checked_from_the_command_line(
    tmp_path: Path, folder: Path, drafter: Drafter, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "options.json").write_text(json.dumps({"target": str(tiny_target)}))
    line = ["--run", str(tmp_path), "--to", str(tmp_path / "out" / "bf16"), "--check"]
    assert export.main(line) == 0
    assert "checked" in capsys.readouterr().out
    served = serving.read(tmp_path / "out" / "bf16")
    assert served == replace(serving.read(folder), dtype=torch.bfloat16)
    for name, weight in serving.read_weights(tmp_path / "out" / "bf16", served).items():
        assert torch.equal(weight, drafter.state_dict()[name].bfloat16())
    assert export.step_of(tmp_path / "out" / "bf16") == 5
    assert export.main(line) == 2
    assert "something in it" in capsys.readouterr().err


@pytest.mark.parametrize("kinds", ["full"])
def test_without_a_target_nothing_is_written(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export.main(["--run", str(folder), "--to", str(tmp_path / "out"), "--check"]) == 2
    assert "--target" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert export.main(["--run", str(folder), "--to", str(tmp_path / "out"), "--dtype", "float32"]) == 0
    assert (tmp_path / "out" / "config.json").read_bytes() == (folder / "config.json").read_bytes()


@pytest.mark.parametrize("kinds", ["full"])
def test_an_export_is_checked_with_the_drafters_mask_token_and_in_the_targets_precision(
    tmp_path: Path, folder: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_target, tmp_path / "target")
    edit(tmp_path / "target", dtype="bfloat16")
    inside = json.loads((folder / "config.json").read_text())["dflash_config"]
    edit(folder, dflash_config=inside | {"mask_token_id": 77})
    used: list[Target] = []
    check = export.check

    def checked(folder: Path, target: Target, *others: Any) -> float:
        used.append(target)
        return check(folder, target, *others)

    monkeypatch.setattr(export, "check", checked)
    line = ["--run", str(folder), "--to", str(tmp_path / "out"), "--check", "--target", str(tmp_path / "target")]
    assert export.main(line) == 0
    assert used[0].language.mask_id == 77
    assert used[0].model.dtype == torch.bfloat16


@pytest.mark.parametrize("kinds", ["full"])
@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_with_a_device_that_is_not_there_nothing_is_written(
    tmp_path: Path, folder: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str], device: str
) -> None:
    line = ["--run", str(folder), "--to", str(tmp_path / "out"), "--check", "--target", str(tiny_target)]
    assert export.main([*line, "--device", device]) == 2
    assert f"{device!r} does not exist here" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
