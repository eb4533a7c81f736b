"""Options that cannot work are refused before any work, in one sentence that names them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from config import PRESETS, Config, ConfigError


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_valid(preset: str) -> None:
    PRESETS[preset]().validate()


@pytest.mark.parametrize(
    "change",
    [
        {"targets": 0},
        {"drafters": 0},
        {"steps": 0},
        {"block_size": 1},
        {"response_length": 1},
        {"batch": 17},
        {"chunk_rows": 60},
        {"kl_weight": 1.5},
        {"gamma": 0.0},
        {"lr": float("nan")},
        {"warmup_ratio": 1.0},
        {"optimizer": "sgd"},
        {"device": "tpu"},
        {"target": Path("nowhere")},
    ],
)
def test_what_cannot_work_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        replace(Config(), **change).validate()
