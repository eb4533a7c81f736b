"""Evaluation on held-out text: acceptance length, and whether the output is the target's own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

import data
from config import Config
from data import Source
from speculative import NO_REGRET, Decoded, Proposer, Regret, acceptance_length, greedy, largest, regret, speculate
from target import Target

T = TypeVar("T")

LOOP_WINDOW = 64
LOOP_PERIOD = 32
NOT_LOOPING_NEEDED = 8
"""With fewer references that do not loop, an evaluation says little, and is called not valid."""

NEAR_TIE = 1.0
"""How far below the largest logit a token may be that a target in bfloat16 chose in a pass over a block.

Passes over a token, a block and a whole text round differently, by units in the last place of the largest logit: one is 0.06 from 8
to 16 and 0.25 from 32 to 64, and a deep target adds more roundings up. With the bundled target no token of 16 responses was more than
0.06 below. With faults put in: where one draft too many was accepted, all 16 responses of 96 tokens had a token 6 or more below; where
a refused one stayed in the cache, three of them had. 30 % of all runners-up are within 1: a single wrong token can pass.
"""

_MOST_BATCHES = 8


@dataclass(frozen=True)
class Reference:
    """A held-out prompt, int64 ``[P]``, the target's own greedy continuation, and that one's regret, see `speculative.regret`."""

    prompt: Tensor
    tokens: list[int]
    regret: Regret = NO_REGRET

    @property
    def loops(self) -> bool:
        """Whether the last 64 tokens repeat themselves with a period of at most 32.

        A small target decoded greedily often ends in a loop, which any drafter guesses: such responses are reported apart.
        """
        end = self.tokens[-LOOP_WINDOW:]
        return len(end) == LOOP_WINDOW and any(end[p:] == end[:-p] for p in range(1, LOOP_PERIOD + 1))


@dataclass(frozen=True)
class Timed:
    """Wall time of one prompt's decoding, prompt included.

    Attributes:
        seconds, seconds_alone: with drafts, and by the target alone.
        tokens_alone: new tokens of the target alone; in bfloat16 a near-tie may end one of the two responses sooner.
    """

    seconds: float
    seconds_alone: float
    tokens_alone: int


@dataclass(frozen=True)
class Evaluation:
    """Responses decoded with drafts, beside the references they must equal.

    Attributes:
        references, decoded: one of each for every prompt.
        timed: of each prompt, decoded with drafts and decoded by the target alone, in turn; empty if that was not compared.
        regrets: of each response, see `speculative.regret`.
    """

    references: list[Reference]
    decoded: list[Decoded]
    timed: list[Timed]
    regrets: list[Regret]

    @property
    def identical(self) -> int:
        """Responses that are the target's own, token for token."""
        return sum(d.tokens == r.tokens for d, r in zip(self.decoded, self.references, strict=True))

    @property
    def target_passes(self) -> int:
        """Forward passes of the target, all prompts together."""
        return sum(d.target_passes for d in self.decoded)

    @property
    def draft_passes(self) -> int:
        """Forward passes of the drafter, all prompts together."""
        return sum(d.draft_passes for d in self.decoded)

    def accepted(self, *, with_loops: bool = True) -> list[list[int]]:
        """Return the accepted drafts of each cycle of each response; responses that end in a loop only if asked for."""
        pairs = zip(self.decoded, self.references, strict=True)
        return [d.accepted for d, r in pairs if d.accepted and (with_loops or not r.loops)]


def tau(accepted: list[list[int]]) -> float:
    """Return the mean over responses of each one's acceptance length (paper, equation 1); not a number without any.

    Args:
        accepted: for each response, the accepted drafts of each cycle.
    """
    lengths = [acceptance_length(cycles) for cycles in accepted]
    return sum(lengths) / len(lengths) if lengths else math.nan


def acceptance_by_position(accepted: list[list[int]], drafts: int) -> list[float]:
    """Return for draft slots 1 to ``drafts`` the share of all cycles in which that slot and all before it were accepted.

    One more than their sum is the mean over all cycles of what equation 1 of the paper counts.
    """
    cycles = [a for response in accepted for a in response]
    return [sum(a >= slot for a in cycles) / len(cycles) if cycles else math.nan for slot in range(1, drafts + 1)]


def references(config: Config, held_out: Source, target: Target) -> list[Reference]:
    """Draw the prompts and decode them with the target alone.

    At most a quarter of the responses may loop, as far as there are others. Which prompts to take is found out with batches, whose
    rounding may differ from that of decoding one prompt; the references are then decoded one by one.
    """
    wanted = config.eval_prompts
    straight: list[Tensor] = []
    looping: list[Tensor] = []
    # Text has as many windows as one wants; a conversation is taken once.
    batches = _MOST_BATCHES if isinstance(held_out, Tensor) else min(_MOST_BATCHES, len(held_out.samples) // wanted)
    for batch in range(batches):
        if len(straight) >= wanted - wanted // 4 and len(straight) + len(looping) >= wanted:
            break
        prompts = data.draw_prompts(
            held_out,
            config.eval_prompt_length,
            [data.generator(config.seed, "evaluation", batch, i) for i in range(wanted)],
            batch * wanted,
            config.seed,
        )
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True).to(target.device)
        greedily = torch.zeros(wanted, device=target.device)
        steps = padded.shape[1] - int(lengths.min()) + config.eval_new_tokens
        responses = target.respond(
            padded, greedily, greedily.unsqueeze(1).repeat(1, steps), lengths=lengths.to(target.device)
        ).tolist()
        for prompt, tokens in zip(prompts, responses, strict=True):
            response = tokens[len(prompt) :][: config.eval_new_tokens]
            kind = looping if Reference(prompt, response).loops else straight
            kind.append(prompt.to(target.device))
    taken_loops = min(len(looping), max(wanted // 4, wanted - len(straight)))
    chosen = straight[: wanted - taken_loops] + looping[:taken_loops]
    found = [Reference(prompt, greedy(target, prompt, config.eval_new_tokens)) for prompt in chosen]
    return [replace(reference, regret=regret(target, reference.prompt, reference.tokens)) for reference in found]


def evaluate(config: Config, target: Target, proposer: Callable[[], Proposer], against: list[Reference]) -> Evaluation:
    """Decode every reference's prompt with drafts, and again by the target alone, to compare the time.

    Both decode the first prompt once before, so that neither is timed while it does what is done once only. Then they take turns
    from prompt to prompt: what else the machine does slows both alike. What measures regrets is not timed.

    Args:
        config: for the length of responses.
        target: the target the references were made with.
        proposer: makes a fresh proposer for each prompt.
        against: from `references`.
    """

    def with_drafts(prompt: Tensor) -> Decoded:
        return speculate(target, proposer(), prompt, config.eval_new_tokens)

    def alone(prompt: Tensor) -> list[int]:
        return greedy(target, prompt, config.eval_new_tokens)

    for reference in against[:1]:
        with_drafts(reference.prompt)
        alone(reference.prompt)
    decoded, timed = [], []
    for reference in against:
        seconds, response = _seconds(with_drafts, reference.prompt)
        seconds_alone, tokens = _seconds(alone, reference.prompt)
        decoded.append(response)
        timed.append(Timed(seconds, seconds_alone, len(tokens)))
    return Evaluation(against, decoded, timed, _regrets_of(target, against, decoded))


def measure(
    config: Config,
    target: Target,
    proposer: Callable[[], Proposer],
    against: list[Reference],
    check: Callable[[], None],
) -> Evaluation:
    """Decode every reference's prompt with drafts, without comparing the time, for which a device had to do nothing else.

    Args:
        check: called before each pass of the drafter; may raise to give up.
        config, target, proposer, against: as in `evaluate`.
    """
    decoded = [speculate(target, proposer(), r.prompt, config.eval_new_tokens, check=check) for r in against]
    return Evaluation(against, decoded, [], _regrets_of(target, against, decoded))


def metrics(evaluation: Evaluation, drafts: int, seconds: float) -> dict[str, Any]:
    """Return an evaluation as values of a metric, in JSON's types; None where there is no number.

    Args:
        evaluation: from `evaluate`.
        drafts: draft slots, ``B - 1``.
        seconds: of decoding with drafts.
    """

    def known(number: float) -> float | None:
        return None if math.isnan(number) else number

    return {
        "tau": known(tau(evaluation.accepted())),
        "tau_not_looping": known(tau(evaluation.accepted(with_loops=False))),
        "acceptance_by_position": [known(share) for share in acceptance_by_position(evaluation.accepted(), drafts)],
        "references": len(evaluation.references),
        "identical": evaluation.identical,
        "largest_regret": largest([r.largest for r in evaluation.regrets]),
        "seconds": round(seconds, 2),
    }


def _regrets_of(target: Target, against: list[Reference], decoded: list[Decoded]) -> list[Regret]:
    return [regret(target, r.prompt, d.tokens) for d, r in zip(decoded, against, strict=True)]


def _seconds(decode: Callable[[Tensor], T], prompt: Tensor) -> tuple[float, T]:
    """Return the wall time of decoding a prompt, all that the device does for it, and the result."""
    _synchronize(prompt.device)
    started = time.perf_counter()
    result = decode(prompt)
    _synchronize(prompt.device)
    return time.perf_counter() - started, result


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def raw(evaluations: dict[str, Evaluation]) -> dict[str, Any]:
    """Return what was measured, in JSON's types, before any mean is taken; all evaluations have the same references."""
    against = next(iter(evaluations.values())).references
    return {
        "references": [
            {"prompt_tokens": len(r.prompt), "tokens": len(r.tokens), "loops": r.loops, **_regret(r.regret)}
            for r in against
        ],
        "drafters": {
            name: [
                {
                    "accepted": d.accepted,
                    "tokens": len(d.tokens),
                    "identical": d.tokens == r.tokens,
                    **_regret(far),
                    "target_forwards": d.target_passes,
                    "drafter_forwards": d.draft_passes,
                    **asdict(timed),
                }
                for d, r, far, timed in zip(e.decoded, e.references, e.regrets, e.timed, strict=True)
            ]
            for name, e in evaluations.items()
        },
    }


def _regret(found: Regret) -> dict[str, Any]:
    return {"regrets": found.gaps, "regrets_in_last_places": found.units}


def summarize(measured: dict[str, Any], drafts: int) -> dict[str, Any]:
    """Compute everything that is reported from the raw numbers alone.

    Args:
        measured: from `raw`.
        drafts: draft slots, ``B - 1``.
    """
    loops = [r["loops"] for r in measured["references"]]
    not_looping = loops.count(False)
    drafters = {}
    for name, responses in measured["drafters"].items():
        accepted = [r["accepted"] for r in responses if r["accepted"]]
        straight = [r["accepted"] for r, looped in zip(responses, loops, strict=True) if r["accepted"] and not looped]
        drafters[name] = {
            "tau": tau(accepted),
            "tau_not_looping": tau(straight),
            "references": len(responses),
            "identical": sum(r["identical"] for r in responses),
            **_regrets(responses),
            "speed_up": speed_up(responses),
            "speed_up_not_looping": speed_up([r for r, looped in zip(responses, loops, strict=True) if not looped]),
            "tokens_per_second": sum(r["tokens"] for r in responses) / sum(r["seconds"] for r in responses),
            "target_forwards": sum(r["target_forwards"] for r in responses),
            "drafter_forwards": sum(r["drafter_forwards"] for r in responses),
            "acceptance_by_position": acceptance_by_position(accepted, drafts),
            "acceptance_by_position_not_looping": acceptance_by_position(straight, drafts),
        }
    return {
        "valid": not_looping >= NOT_LOOPING_NEEDED,
        "references": len(loops),
        "not_looping": not_looping,
        "not_looping_needed": NOT_LOOPING_NEEDED,
        "target_alone": _regrets(measured["references"]),
        "drafters": drafters,
    }


def speed_up(responses: list[dict[str, Any]]) -> float:
    """Return how many times as many tokens a second come with drafts as from the target alone, over all responses together.

    With as many tokens in each response as alone, this is the ratio of the wall times. Without responses it is not a number.
    """
    if not responses:
        return math.nan
    seconds, tokens, seconds_alone, tokens_alone = (
        sum(r[name] for r in responses) for name in ("seconds", "tokens", "seconds_alone", "tokens_alone")
    )
    return (tokens / seconds) / (tokens_alone / seconds_alone)


def _regrets(responses: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what is said of all tokens of responses: how many there are, how many are not the likeliest, and how far at most."""
    gaps = [gap for r in responses for gap in r["regrets"]]
    return {
        "tokens": sum(r["tokens"] for r in responses),
        "not_likeliest": len(gaps),
        "largest_regret": largest(gaps),
        "largest_regret_in_last_places": largest([units for r in responses for units in r["regrets_in_last_places"]]),
    }
