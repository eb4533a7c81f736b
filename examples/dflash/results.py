"""What a complete run came to: the checks that it has to pass, and its numbers for people."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import evaluate
from config import Config


def failed_checks(config: Config, summary: dict[str, Any], on_the_way: list[dict[str, Any]]) -> list[str]:
    """Return what is not as it must be.

    Args:
        config: of the run.
        summary: of the run, but for what this returns.
        on_the_way: the metrics of its evaluations.
    """
    training, graphs, evaluation = (summary[part] for part in ("training", "graphs", "evaluation"))
    drafters = evaluation["drafters"]
    # In bfloat16 a pass over a block may decide a near-tie otherwise than one over a token.
    near_ties = config.target_dtype == "bfloat16"
    tau = {name: drafter["tau_not_looping"] for name, drafter in drafters.items()}
    # The loss of D-PACE weighs more the better the drafter is, so it need not fall.
    learned = {
        "decay": {"the loss did not fall": training["loss_last_tenth"] < training["loss_first_tenth"]},
        "dpace": {
            "the expected acceptance length did not rise": training["eal_last_tenth"] > training["eal_first_tenth"]
        },
    }
    checks = {
        **learned[config.position_weights],
        "output differs from the target's own": all(
            d["identical"] == d["references"] or (near_ties and d["largest_regret"] <= evaluate.NEAR_TIE)
            for d in (*drafters.values(), *on_the_way)
        ),
        "too few responses do not loop: the evaluation is not valid": evaluation["valid"],
        f"the trained drafter's acceptance length is below {config.tau}": tau["trained"] >= config.tau,
        "the trained drafter is not accepted more than the n-gram drafter": tau["trained"] > tau["n-gram"],
        "the trained drafter is accepted less than twice as much as the untrained one": (
            tau["trained"] >= 2 * tau["untrained"]
        ),
        "the replicas differ": training["largest_difference_between_replicas"] == 0.0,
        "the threads compiled another number of graphs than one thread does": all(
            graphs["compiled_by_one_thread"] in (None, compiled)
            for compiled in (
                graphs["compiled_by_all_threads"],
                *(n["graphs"] for n in summary.get("nodes", ())),
            )
        ),
    }
    return [failure for failure, passed in checks.items() if not passed]


def shown(config: Config, summary: dict[str, Any]) -> Iterator[str]:
    """Return the lines that people are to see."""
    training, graphs, evaluation = (summary[part] for part in ("training", "graphs", "evaluation"))
    first, last = training["loss_first_tenth"], training["loss_last_tenth"]
    looping = evaluation["references"] - evaluation["not_looping"]
    yield (f"\nloss {first:.3f} in the first tenth of the steps, {last:.3f} in the last")
    yield (
        f"expected acceptance length {training['eal_first_tenth']:.2f} in the first, {training['eal_last_tenth']:.2f} in the last"
    )
    yield (
        f"\nspeculative decoding of {evaluation['references']} held-out prompts, {looping} of them with responses that loop"
    )
    yield (
        f"{'drafter':10} {'acceptance length':>18} {'without loops':>14} {'target passes':>14} {'drafter passes':>15} {'identical':>10} {'speed-up':>9}"
    )
    for name, drafter in evaluation["drafters"].items():
        yield (
            f"{name:10} {drafter['tau']:18.2f} {_number(drafter['tau_not_looping']):>14} {drafter['target_forwards']:14} "
            f"{drafter['drafter_forwards']:15} {drafter['identical']:7}/{evaluation['references']} {drafter['speed_up']:9.2f}"
        )
    yield ("speed-up: tokens a second with drafts, over those of the target alone, decoded in turn")
    if config.target_dtype == "bfloat16":
        yield (
            f"\ntokens that are not the likeliest in one pass over the whole response; their logits may be {evaluate.NEAR_TIE:g} below it"
        )
        for name, found in (("alone", evaluation["target_alone"]), *evaluation["drafters"].items()):
            yield (
                f"{name:10} {found['not_likeliest']:4} of {found['tokens']}, at most {found['largest_regret']:.3g} below, or "
                f"{found['largest_regret_in_last_places']:.3g} units in the last place of the largest logit"
            )
    yield (f"\nlargest difference between replicas: {training['largest_difference_between_replicas']}")
    alone = graphs["compiled_by_one_thread"]
    yield (
        f"graphs compiled by all threads: {graphs['compiled_by_all_threads']}, by one thread alone: "
        + ("not compared, the threads are on several devices" if alone is None else str(alone))
    )
    yield ("seconds: " + ", ".join(f"{stage} {s:.0f}" for stage, s in summary["seconds"].items()))


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"
