"""A target whose cache cannot be turned back, as that of a window or of a recurrent state, is decoded with drafts, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the example's target is a transformers model")

from torch import Tensor

from config import Config, ConfigError
from drafter import new_drafter
from speculative import DFlashProposer, greedy, speculate
from target import Features, Target
from tests.helpers.models import tiny_model

CPU = torch.device("cpu")
PROMPT = torch.randint(2, 258, (10,), generator=torch.Generator().manual_seed(3))
WINDOW = 8
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "window": (
        "Qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        },
    ),
    "recurrent": (
        "Qwen3Next",
        {
            "mlp_only_layers": list(range(5)),
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, options = KINDS[request.param]
    path = tmp_path_factory.mktemp(request.param)
    tiny_model(architecture, vocab_size=258, head_dim=8, eos_token_id=0, **options).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return Target(folder, (0, 2, 3), CPU)


class Oracle:
    """Draft the truth up to some slot, and something else from there on; keep the features handed in."""

    passes = 0

    def __init__(self, truth: list[int], right: int) -> None:
        self._truth, self._right = truth, right
        self.features: list[Tensor] = []

    def propose(self, known: list[int], features: Tensor) -> Tensor:
        self.features.append(features)
        drafts = torch.tensor((self._truth[len(known) - len(PROMPT) :] + [0] * 4)[:4])
        drafts[self._right :] = 2 + (drafts[self._right :] + 1) % 256
        return drafts


@pytest.mark.parametrize("right", [0, 2, 4])
def test_refused_drafts_leave_nothing_behind(target: Target, right: int) -> None:
    assert not target.croppable
    truth = greedy(target, PROMPT, 30)
    oracle = Oracle(truth, right)
    decoded = speculate(target, oracle, PROMPT, 26)
    assert decoded.tokens == truth[:26]
    assert decoded.accepted == [right] * (25 // (right + 1)) + ([25 % (right + 1) - 1] if 25 % (right + 1) else [])
    again = 0 if right == 4 else len(decoded.accepted)
    assert decoded.target_passes == 1 + len(decoded.accepted) + again
    seen = torch.cat(oracle.features, dim=1)
    whole = target.forward(torch.cat((PROMPT, torch.tensor(truth))).unsqueeze(0)).tapped
    torch.testing.assert_close(seen, whole[:, : seen.shape[1]], rtol=1e-4, atol=1e-4)


def test_an_untrained_drafter_changes_nothing(target: Target) -> None:
    drafter = new_drafter(Config(), target.shape, 3, CPU)
    assert speculate(target, DFlashProposer(drafter, target, 8), PROMPT, 24).tokens == greedy(target, PROMPT, 24)


def test_a_target_that_reads_a_block_without_its_cache_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Target.forward

    def forgets(self: Target, tokens: Tensor, cache: Any = None) -> Features:
        return forward(self, tokens)

    monkeypatch.setattr(Target, "forward", forgets)
    with pytest.raises(ConfigError, match="does not read a block after its cache as it reads the whole"):
        Target(folder, (0, 2, 3), CPU)
