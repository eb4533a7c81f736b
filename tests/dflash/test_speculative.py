"""Speculative decoding gives the target's own tokens, whoever drafts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the example's target is a transformers model")

from torch import Tensor

from config import Config
from evaluate import Evaluation, Reference, raw, references, summarize
from speculative import Decoded, DFlashProposer, NGramProposer, acceptance_length, greedy, speculate
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
        self.passes = 0

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
    monkeypatch.setattr(target, "language", replace(target.language, eos_ids=(end, 1000)))
    stopped = greedy(target, PROMPT, 24)
    assert stopped == truth[: truth.index(end) + 1]
    assert speculate(target, Oracle(truth, 4), PROMPT, 24).tokens == stopped


@pytest.mark.parametrize("by", ["length", "end of text"])
def test_drafts_past_the_end_of_a_response_do_not_count(
    target: Target, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    truth = greedy(target, PROMPT, 24)
    lasts = [i for i in range(1, 16) if by == "length" or truth[i] not in truth[:i]]
    assert any(last % 5 for last in lasts)
    for last in lasts:
        eos_ids = () if by == "length" else (truth[last],)
        monkeypatch.setattr(target, "language", replace(target.language, eos_ids=eos_ids))
        decoded = speculate(target, Oracle(truth, 4), PROMPT, last + 1 if by == "length" else 24)
        assert decoded.tokens == truth[: last + 1]
        whole, rest = divmod(last, 5)  # a cycle yields 5 tokens
        assert decoded.accepted == [4] * whole + [rest - 1] * bool(rest)


def test_forward_passes_are_counted_where_they_are_made(target: Target) -> None:
    drafter = new_drafter(Config(), target.shape, 3, CPU)
    before = target.passes
    decoded = speculate(target, DFlashProposer(drafter, target, 8), PROMPT, 16)
    assert decoded.target_passes == target.passes - before == len(decoded.accepted) + 1
    assert decoded.draft_passes == len(decoded.accepted)
    assert speculate(target, NGramProposer(7), PROMPT, 16).draft_passes == 0


def test_acceptance_length_counts_the_targets_own_token() -> None:
    assert acceptance_length([0, 1, 2]) == 2.0


def test_everything_reported_follows_from_the_accepts_of_each_cycle() -> None:
    straight, looping = Reference(PROMPT, list(range(128))), Reference(PROMPT, [7] * 128)
    decoded = [Decoded(straight.tokens, [0, 1, 2], 4, 3), Decoded(looping.tokens, [3, 3], 3, 2)]
    measured = json.loads(json.dumps(raw({"some": Evaluation([straight, looping], decoded, 1.0, [0.0, 0.5])})))
    summary = summarize(measured, 3)
    some = summary["drafters"]["some"]
    assert (some["tau"], some["tau_not_looping"]) == (3.0, 2.0)
    assert some["acceptance_by_position"] == [4 / 5, 3 / 5, 2 / 5]
    assert some["acceptance_by_position_not_looping"] == [2 / 3, 1 / 3, 0]
    assert (some["identical"], some["target_forwards"], some["drafter_forwards"]) == (2, 7, 5)
    assert some["largest_regret"] == 0.5
    assert (summary["references"], summary["not_looping"], summary["valid"]) == (2, 1, False)


@pytest.mark.parametrize(("straight", "valid"), [(7, False), (8, True)])
def test_with_fewer_than_8_references_that_do_not_loop_the_evaluation_is_not_valid(straight: int, valid: bool) -> None:
    references = [Reference(PROMPT, list(range(128)))] * straight + [Reference(PROMPT, [7] * 128)] * 8
    decoded = [Decoded(r.tokens, [0], 2, 1) for r in references]
    assert summarize(raw({"some": Evaluation(references, decoded, 1.0, [0.0] * len(decoded))}), 3)["valid"] is valid


def test_references_are_the_targets_own_decoding_of_held_out_text(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evaluate._MOST_BATCHES", 2)
    config = Config(eval_prompts=4, eval_prompt_length=12, eval_new_tokens=70)
    text = torch.randint(2, 258, (400,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    found = references(config, text, target)
    assert len(found) == 4
    for reference in found:
        assert reference.tokens == greedy(target, reference.prompt, 70)
        assert reference.prompt.tolist() in [text[i : i + 12].tolist() for i in range(389)]
