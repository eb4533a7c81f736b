"""What the program checks at its end holds on GPUs and for targets in bfloat16, too, and fails where it must."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("transformers", reason="the example's target is a transformers model")
pytest.importorskip("rich", reason="the example's display")
pytest.importorskip("matplotlib", reason="the example's plots")

import demo
import evaluate
import results
from config import Config
from evaluate import Reference
from speculative import NGramProposer, greedy
from target import Target

COMPILES = "the threads compiled another number of graphs than one thread does"


def summary(**parts: dict[str, Any]) -> dict[str, Any]:
    """Return what a run that passes all checks has found, but for ``parts``."""
    drafter = {"references": 2, "identical": 2, "largest_regret": 0.0}
    drafters = {
        name: drafter | {"tau_not_looping": tau} for name, tau in (("untrained", 1), ("n-gram", 2), ("trained", 4))
    }
    return {
        "training": {
            "loss_first_tenth": 5.0,
            "loss_last_tenth": 1.0,
            "eal_first_tenth": 1.0,
            "eal_last_tenth": 3.0,
            "largest_difference_between_replicas": 0.0,
        }
        | parts.get("training", {}),
        "graphs": {"compiled_by_all_threads": 3, "compiled_by_one_thread": 3} | parts.get("graphs", {}),
        "evaluation": {"references": 2, "valid": True, "drafters": drafters | parts.get("drafters", {})},
    }


def failures(config: Config, **parts: dict[str, Any]) -> list[str]:
    measured = [{"references": 2, "identical": 2, "largest_regret": 0.0} | parts.get("on the way", {})]
    return results.failed_checks(config, summary(**parts), measured)


@pytest.mark.parametrize(("alone", "failed"), [(3, []), (4, [COMPILES]), (0, [COMPILES]), (None, [])])
def test_graphs_are_compared_with_those_of_one_thread_if_there_are_any(alone: int | None, failed: list[str]) -> None:
    assert failures(Config(), graphs={"compiled_by_one_thread": alone}) == failed


@pytest.mark.parametrize(
    ("weights", "training", "failed"),
    [
        ("decay", {"loss_last_tenth": 5.0}, ["the loss did not fall"]),
        ("decay", {"eal_last_tenth": 1.0}, []),
        ("dpace", {"loss_last_tenth": 5.0}, []),
        ("dpace", {"eal_last_tenth": 1.0}, ["the expected acceptance length did not rise"]),
    ],
)
def test_the_loss_falls_or_where_it_need_not_the_expected_acceptance_length_rises(
    weights: Any, training: dict[str, Any], failed: list[str]
) -> None:
    assert failures(Config(position_weights=weights), training=training) == failed


@pytest.mark.parametrize(
    ("devices", "losses", "expected"),
    [
        (("cuda:0", "cuda:0"), [5.0], 3),
        (("cuda:0", "cuda:1"), [5.0], None),  # each function is compiled once for each of them
        (("cpu", "cuda:0"), [5.0], None),
        (("cpu", "cpu"), [], 0),
    ],
)
def test_graphs_are_counted_alone_only_where_all_threads_are_on_one_device(
    monkeypatch: pytest.MonkeyPatch, devices: tuple[str, ...], losses: list[float], expected: int | None
) -> None:
    monkeypatch.setattr(Config, "devices", lambda self: [torch.device(name) for name in devices])
    monkeypatch.setattr("train.compiles_of_one_thread", lambda *given: 3)
    training, target = cast("Any", SimpleNamespace(losses=losses)), cast("Any", None)
    made = object.__new__(demo.Run)
    made.config, made._cache, made._train_on = Config(), None, torch.zeros(0)
    assert made._compiled_by_one_thread(training, target) == expected


@pytest.mark.parametrize(
    ("dtype", "identical", "regret", "passes"),
    [
        ("float32", 2, 0.0, True),
        ("float32", 1, 0.0, False),
        ("float32", 1, 0.1, False),
        ("bfloat16", 1, 0.0, True),
        ("bfloat16", 1, evaluate.NEAR_TIE, True),
        ("bfloat16", 1, 1.1 * evaluate.NEAR_TIE, False),
        ("bfloat16", 1, float("nan"), False),
    ],
)
def test_a_target_in_bfloat16_may_decide_near_ties_otherwise_and_nothing_else(
    dtype: Any, identical: int, regret: float, passes: bool
) -> None:
    drafter = {"references": 2, "identical": identical, "largest_regret": regret, "tau_not_looping": 4}
    config = Config(target_dtype=dtype)
    for measured in ({"drafters": {"trained": drafter}}, {"on the way": drafter}):
        assert failures(config, **measured) == ([] if passes else ["output differs from the target's own"])


def test_the_regret_of_each_response_is_measured(tiny_target: Path) -> None:
    target = Target(tiny_target, (0, 2, 3), torch.device("cpu"))
    prompt = torch.arange(2, 14)
    against = [Reference(prompt, greedy(target, prompt, 8))]
    right = evaluate.evaluate(Config(eval_new_tokens=8), target, lambda: NGramProposer(3), against)
    assert right.regrets[0].largest < 1e-4
    with pytest.MonkeyPatch.context() as patch:
        wrong = replace(right.decoded[0], tokens=[(token + 1) % 256 for token in against[0].tokens])
        patch.setattr(evaluate, "speculate", lambda *given: wrong)
        found = evaluate.evaluate(Config(eval_new_tokens=8), target, lambda: NGramProposer(3), against)
    assert len(found.regrets[0].gaps) == 8
    assert found.regrets[0].largest > 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_speed_up_is_shown_and_in_bfloat16_how_far_tokens_are_from_the_likeliest(dtype: Any) -> None:
    passes = {"tau": 2.0, "target_forwards": 9, "drafter_forwards": 8, "speed_up": 1.75}
    regrets = {"tokens": 500, "not_likeliest": 3, "largest_regret": 0.25, "largest_regret_in_last_places": 2.0}
    found = summary() | {"seconds": {}}
    found["evaluation"] |= {"not_looping": 1, "target_alone": regrets | {"not_likeliest": 1}}
    for drafter in found["evaluation"]["drafters"].values():
        drafter.update(passes | regrets)
    out = "".join(f"{line}\n" for line in results.shown(Config(target_dtype=dtype), found))
    assert out.count(" 1.75\n") == 3
    far = "at most 0.25 below, or 2 units in the last place"
    assert out.count(f"3 of 500, {far}") == (3 if dtype == "bfloat16" else 0)
    assert out.count(f"1 of 500, {far}") == (1 if dtype == "bfloat16" else 0)
    assert (f"may be {evaluate.NEAR_TIE:g} below" in out) is (dtype == "bfloat16")
