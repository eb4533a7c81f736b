"""Speculative decoding gives the target's own tokens, whoever drafts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

pytest.importorskip("transformers", reason="the example's target is a transformers model")

from torch import Tensor

from config import Config
from drafter import new_drafter
from evaluate import Evaluation, Reference, Timed, evaluate, raw, references, summarize
from speculative import Decoded, DFlashProposer, NGramProposer, Regret, acceptance_length, greedy, regret, speculate
from target import Features, Target

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
    straight = Reference(PROMPT, list(range(128)), Regret((0.5, 0.25), (2.0, 1.0)))
    looping = Reference(PROMPT, [7] * 128)
    decoded = [Decoded(straight.tokens, [0, 1, 2], 4, 3), Decoded(looping.tokens[:100], [3, 3], 3, 2)]
    timed = [Timed(2.0, 6.0, 128), Timed(1.0, 3.0, 128)]
    evaluation = Evaluation([straight, looping], decoded, timed, [Regret(), Regret((0.125,), (4.0,))])
    summary = summarize(json.loads(json.dumps(raw({"some": evaluation}))), 3)
    some = summary["drafters"]["some"]
    assert (some["tau"], some["tau_not_looping"]) == (3.0, 2.0)
    assert some["acceptance_by_position"] == [4 / 5, 3 / 5, 2 / 5]
    assert some["acceptance_by_position_not_looping"] == [2 / 3, 1 / 3, 0]
    assert (some["identical"], some["target_forwards"], some["drafter_forwards"]) == (1, 7, 5)
    assert (summary["references"], summary["not_looping"], summary["valid"]) == (2, 1, False)
    assert some["tokens_per_second"] == 228 / 3
    assert some["speed_up"] == pytest.approx((228 / 3) / (256 / 9))
    assert some["speed_up_not_looping"] == 3.0
    regrets = ("tokens", "not_likeliest", "largest_regret", "largest_regret_in_last_places")
    assert [some[name] for name in regrets] == [228, 1, 0.125, 4.0]
    assert [summary["target_alone"][name] for name in regrets] == [256, 2, 0.5, 2.0]


def test_a_regret_that_is_no_number_is_not_passed_over() -> None:
    response = Reference(PROMPT, [1, 2])
    regrets = [Regret((0.5,), (1.0,)), Regret((0.1, float("nan"), 0.2), (1.0, float("nan"), 1.0))]
    assert str(regrets[1].largest) == "nan"
    decoded = [Decoded(response.tokens, [0], 2, 1)] * 2
    measured = raw({"some": Evaluation([response] * 2, decoded, [Timed(1.0, 1.0, 2)] * 2, regrets)})
    assert str(summarize(measured, 3)["drafters"]["some"]["largest_regret"]) == "nan"


def test_only_decoding_is_timed_in_turn_and_not_the_first_time(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here decoding with drafts takes 3 seconds, alone 5, and everything else that could be timed 100."""
    now, order = [0.0], []

    def lasts(name: str, seconds: float, result: object) -> None:
        def work(judge: object, *given: object) -> object:
            now[0] += seconds
            order.append(name)
            return result

        monkeypatch.setattr(f"evaluate.{name}", work)

    lasts("speculate", 3.0, Decoded([1, 2, 3], [2], 2, 1))
    lasts("greedy", 5.0, [1, 2])
    lasts("regret", 100.0, Regret())
    monkeypatch.setattr("evaluate.time.perf_counter", lambda: now[0])
    against = [Reference(PROMPT, [1, 2, 3])] * 3
    found = evaluate(Config(), target, lambda: NGramProposer(3), against)
    assert order == ["speculate", "greedy"] * 4 + ["regret"] * 3
    assert found.timed == [Timed(3.0, 5.0, 2)] * 3


def test_a_cycle_reads_from_the_device_once_and_sends_nothing_to_it(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reading waits for the device, and so does each tensor that is made of numbers on the host."""
    waits: list[str] = []

    def counted(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def call(*given: object, **named: object) -> object:
            if given[0] != []:  # a new cache is empty
                waits.append(name)
            return original(*given, **named)

        monkeypatch.setattr(owner, name, call)

    for owner, names in (
        (Tensor, ("tolist", "item", "__int__", "__bool__", "__float__", "__index__", "new_tensor", "cpu")),
        (torch, ("tensor", "as_tensor", "from_numpy")),
    ):
        for name in names:
            counted(owner, name)
    drafter = new_drafter(Config(), target.shape, 3, CPU)
    proposer = DFlashProposer(drafter, target, 8)
    waits.clear()
    decoded = speculate(target, proposer, PROMPT, 24)
    assert waits == [
        "tolist",
        "__int__",
        *["tolist"] * len(decoded.accepted),
    ]  # the prompt, its first token, the cycles
    waits.clear()
    assert len(greedy(target, PROMPT, 24)) == 24
    assert waits == ["__int__"] * 24


class Says:
    """A target that says the same logits in whichever precision, whatever it reads."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def new_cache(self) -> None:
        """Have nothing to keep."""

    def forward(self, tokens: Tensor, cache: None) -> Features:
        # What is read after the prompt's last token stands for the logits.
        normed = torch.cat((torch.zeros(tokens.shape[1] - len(self._logits), self._logits.shape[1]), self._logits))
        return Features(normed.unsqueeze(0), normed.unsqueeze(0))

    def logits(self, normed: Tensor) -> Tensor:
        return normed.to(self._logits.dtype)


def test_a_regret_is_counted_in_units_in_the_last_place_of_the_largest_logit() -> None:
    logits = torch.tensor(
        [
            [13.0, 12.9375, 0.0],  # below 16 a unit is 2 ** 3 * 2 ** -7
            [40.0, 39.5, 0.0],  # below 64 it is 2 ** 5 * 2 ** -7
            [8.0, 8.0, 0.0],  # as large as the likeliest
            [-3.0, -4.0, -9.0],  # below 4, and above it
            [1.0, 0.0, 2.0],
        ],
        dtype=torch.bfloat16,
    )
    says = cast("Target", Says(logits))
    found = regret(says, PROMPT, [1, 1, 1, 1, 2])
    assert found == Regret((0.0625, 0.5, 1.0), (1.0, 2.0, 1.0 / (2 * 2**-7)))
    assert found.largest == 1.0
    assert regret(says, PROMPT, [0, 0, 0, 0, 2]) == Regret()
    logits[3, 2] = float("nan")
    assert str(regret(says, PROMPT, [0, 0, 0, 0, 2]).largest) == "nan"


@pytest.mark.parametrize(("straight", "valid"), [(7, False), (8, True)])
def test_with_fewer_than_8_references_that_do_not_loop_the_evaluation_is_not_valid(straight: int, valid: bool) -> None:
    references = [Reference(PROMPT, list(range(128)))] * straight + [Reference(PROMPT, [7] * 128)] * 8
    decoded = [Decoded(r.tokens, [0], 2, 1) for r in references]
    evaluation = Evaluation(references, decoded, [Timed(1.0, 1.0, 128)] * len(decoded), [Regret()] * len(decoded))
    assert summarize(raw({"some": evaluation}), 3)["valid"] is valid


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
