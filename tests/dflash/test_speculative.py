"""Speculative decoding gives the target's own tokens, whoever drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the example's target is a transformers model")

from torch import Tensor

import data
from config import Config
from evaluate import Reference
from speculative import Decoded, DFlashProposer, NGramProposer, greedy, speculate
from target import Target
from train import new_drafter

CPU = torch.device("cpu")
PROMPT = torch.randint(2, 258, (10,), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return Target(tiny_target, (0, 2, 3), CPU)


class Oracle:
    """Draft the truth up to some slot, and something else from there on."""

    def __init__(self, truth: list[int], right: int) -> None:
        self._truth, self._right = truth, right
        self.seen: list[tuple[int, int]] = []

    def propose(self, known: list[int], features: Tensor) -> Tensor:
        self.seen.append((len(known) - 1, features.shape[1]))
        done = len(known) - len(PROMPT)
        assert known == PROMPT.tolist() + self._truth[:done]
        drafts = torch.tensor((self._truth[done:] + [0] * 4)[:4])
        drafts[self._right :] = 2 + (drafts[self._right :] + 1) % 256
        return drafts


@pytest.mark.parametrize("right", [0, 1, 3, 4])
def test_the_right_number_of_drafts_is_accepted(target: Target, right: int) -> None:
    truth = greedy(target, PROMPT, 24)
    oracle = Oracle(truth, right)
    decoded = speculate(target, oracle, PROMPT, 20)
    assert decoded.tokens == truth[:20]
    assert decoded.accepted[:-1] == [right] * (len(decoded.accepted) - 1)
    assert decoded.target_passes == len(decoded.accepted) + 1
    # Each cycle hands in the features of exactly the tokens that became known.
    assert oracle.seen[0] == (10, 10)
    assert oracle.seen[1:] == [(10 + i * (right + 1), right + 1) for i in range(1, len(oracle.seen))]


@pytest.mark.parametrize("seed", range(4))
def test_an_untrained_drafter_changes_nothing(target: Target, seed: int) -> None:
    prompt = torch.randint(2, 258, (12,), generator=torch.Generator().manual_seed(seed))
    drafter = new_drafter(Config(seed=seed), target.shape, 3, CPU)
    decoded = speculate(target, DFlashProposer(drafter, target, 8), prompt, 32)
    assert decoded.tokens == greedy(target, prompt, 32)


def test_an_ngram_drafter_changes_nothing(target: Target) -> None:
    assert speculate(target, NGramProposer(7), PROMPT, 32).tokens == greedy(target, PROMPT, 32)


@pytest.mark.parametrize(
    ("known", "drafts"),
    [
        ([5, 6, 7, 9, 9, 5, 6], [7, 9, 9]),  # the longest end that occurred before
        ([5, 6, 1, 5, 6, 2, 5, 6], [2, 5, 6]),  # the latest place
        ([8, 8], [8, 0, 0]),
        ([1, 2, 3], [0, 0, 0]),
    ],
)
def test_ngram_drafts_are_what_followed_before(known: list[int], drafts: list[int]) -> None:
    assert NGramProposer(3).propose(known, torch.zeros(1, 1, 1)).tolist() == drafts


@pytest.mark.parametrize(
    ("tokens", "loops"),
    [
        (list(range(64)) + [1, 2, 3] * 22, True),
        (list(range(100, 132)) * 2, True),
        (list(range(100, 133)) * 2, False),
        (list(range(128)), False),
        ([7] * 63, False),
    ],
)
def test_a_response_loops_if_its_last_64_tokens_have_a_period_of_at_most_32(tokens: list[int], loops: bool) -> None:
    assert Reference(PROMPT, tokens).loops is loops


def test_decoding_stops_at_the_end_of_text(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = greedy(target, PROMPT, 24)
    end = next(t for i, t in enumerate(truth) if i >= 4 and t not in truth[:i])
    monkeypatch.setattr(data, "EOS_ID", end)
    stopped = greedy(target, PROMPT, 24)
    assert stopped == truth[: truth.index(end) + 1]
    assert speculate(target, Oracle(truth, 4), PROMPT, 24).tokens == stopped


def test_acceptance_length_counts_the_targets_own_token() -> None:
    assert Decoded([1, 2, 3, 4, 5], [0, 1, 2], 4, 3).acceptance_length == 2.0
