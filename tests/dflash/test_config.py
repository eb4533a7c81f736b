"""Options that cannot work are refused before any work, in one sentence that names them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from config import Config, ConfigError


def test_the_defaults_are_valid() -> None:
    Config().validate()


@pytest.mark.parametrize(
    "change",
    [
        {"targets": 0},
        {"drafters": 0},
        {"steps": 0},
        {"block_size": 1},
        {"response_length": 1},
        {"batch": 17},
        {"uses": 3},
        {"sequences": 81},
        {"chunk_blocks": 7},
        {"gradient": "kept"},
        {"kl_weight": 1.5},
        {"gamma": 0.0},
        {"position_weights": "uniform"},
        {"dpace_alpha": 0.0, "position_weights": "dpace"},
        {"dpace_alpha": 1.5, "position_weights": "dpace"},
        {"dpace_alpha": 0.25},
        {"lr": float("nan")},
        {"warmup_ratio": 1.0},
        {"optimizer": "sgd"},
        {"device": "tpu"},
        {"device": "cpu,cuda:99"},
        {"taps": (1, 1)},
        {"taps": ()},
        {"taps": (-1, 0)},
        {"draft_heads": 0},
        {"layer_types": ("full_attention",)},
        {"layer_types": ("full_attention", "causal")},
        {"sliding_window": 0},
        {"sliding_window": 16},
        {"sliding_window": 16, "layer_types": ("full_attention", "full_attention")},
        {"layer_types": ("full_attention", "sliding_attention")},
        {"mask_token_id": -1},
        {"lr": float("inf")},
        {"target_dtype": "float16"},
        {"target_dtype": "bfloat16"},
        {"text": Path("nowhere")},
        {"save_every": 0},
        {"node_timeout": 1.0},
        {"collective_timeout": 0.0},
        {"target": Path("nowhere")},
    ],
)
def test_what_cannot_work_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        replace(Config(), **change).validate()


def test_weights_from_confidence_go_with_any_share_of_the_divergence() -> None:
    for kl_weight in (0.0, 0.5, 1.0):
        replace(Config(), position_weights="dpace", dpace_alpha=0.25, kl_weight=kl_weight).validate()


def test_a_batch_of_work_is_used_up_by_the_steps_made_with_it() -> None:
    replace(Config(), uses=4).validate()
    replace(Config(), sequences=80).validate()


@pytest.mark.parametrize("planned", [False, True])
def test_drafters_on_two_kinds_of_devices_are_refused(planned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    mixed = replace(Config(), targets=2, drafters=2, device="cuda:0,cuda:1,cuda:0,cpu")
    with pytest.raises(ConfigError, match="which puts drafters onto cpu and cuda"):
        mixed.validate(planned=planned)
    replace(mixed, device="cpu,cpu,cuda:0,cuda:1").validate(planned=planned)
    replace(mixed, device="cuda:0,cpu,cpu,cpu").validate(planned=planned)


def test_sequences_longer_than_the_target_was_made_for_are_refused() -> None:
    config = replace(Config(), prompt_length=100, response_length=60, eval_prompt_length=150, eval_new_tokens=20)
    config.check_positions(170)
    config.check_positions(None)
    with pytest.raises(
        ConfigError, match=r"eval_prompt_length \+ eval_new_tokens is 170, but the target has positions for 169 tokens"
    ):
        config.check_positions(169)
    with pytest.raises(
        ConfigError, match=r"^prompt_length \+ response_length is 160, but the target has positions for 159 tokens"
    ):
        config.check_positions(159)


def test_threads_wrap_around_onto_the_devices_there_are() -> None:
    assert [d.type for d in replace(Config(), device="cpu").devices()] == ["cpu"] * 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.device_count", lambda: 3)
        assert [d.index for d in Config().devices()] == [0, 1, 2, 0, 1, 2, 0, 1]
        mapped = replace(Config(), targets=2, drafters=2, device="cuda:2,cpu,cuda:0").devices()
        assert [str(d) for d in mapped] == ["cuda:2", "cpu", "cuda:0", "cuda:2"]
