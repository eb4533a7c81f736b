"""Evaluation on held-out text: acceptance length, and whether the output is the target's own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import data
from config import Config
from data import Source
from speculative import Decoded, Proposer, acceptance_length, greedy, regret, speculate
from target import Target

LOOP_WINDOW = 64
LOOP_PERIOD = 32
NOT_LOOPING_NEEDED = 8
"""With fewer references that do not loop, an evaluation says little, and is called not valid."""

NEAR_TIE = 1.0
"""How far below the largest logit a token may be that a target in bfloat16 chose in a pass over a block.

Passes over a token, a block and a whole text round differently. With the bundled target it was at most 0.06, the unit in the last
place of a logit of 13; a unit of one above 32 is 0.25, and a deep target adds more roundings up. Where tokens are wrong, one of
hundreds is soon several below.
"""

_MOST_BATCHES = 8


@dataclass(frozen=True)
class Reference:
    """A held-out prompt, int64 ``[P]``, and the target's own greedy continuation."""

    prompt: Tensor
    tokens: list[int]

    @property
    def loops(self) -> bool:
        """Whether the last 64 tokens repeat themselves with a period of at most 32.

        A small target decoded greedily often ends in a loop, which any drafter guesses: such responses are reported apart.
        """
        end = self.tokens[-LOOP_WINDOW:]
        return len(end) == LOOP_WINDOW and any(end[p:] == end[:-p] for p in range(1, LOOP_PERIOD + 1))


@dataclass(frozen=True)
class Evaluation:
    """Responses decoded with drafts, beside the references they must equal.

    Attributes:
        references, decoded: one of each for every prompt.
        seconds: wall time.
        regrets: of each response, see `speculative.regret`; 0 where it is the reference.
    """

    references: list[Reference]
    decoded: list[Decoded]
    seconds: float
    regrets: list[float]

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
    return [Reference(prompt, greedy(target, prompt, config.eval_new_tokens)) for prompt in chosen]


def evaluate(
    config: Config,
    target: Target,
    proposer: Callable[[], Proposer],
    against: list[Reference],
    check: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Decode every reference's prompt with drafts.

    Args:
        config: for the length of responses.
        target: the target the references were made with.
        proposer: makes a fresh proposer for each prompt.
        against: from `references`.
        check: called before each pass of the drafter; may raise to give up.
    """
    started = time.monotonic()
    decoded = [speculate(target, proposer(), r.prompt, config.eval_new_tokens, check=check) for r in against]
    seconds = time.monotonic() - started
    return Evaluation(against, decoded, seconds, regrets(target, against, decoded))


def metrics(evaluation: Evaluation, drafts: int) -> dict[str, Any]:
    """Return an evaluation as values of a metric, in JSON's types; None where there is no number.

    Args:
        evaluation: from `evaluate`.
        drafts: draft slots, ``B - 1``.
    """

    def known(number: float) -> float | None:
        return None if math.isnan(number) else number

    return {
        "tau": known(tau(evaluation.accepted())),
        "tau_not_looping": known(tau(evaluation.accepted(with_loops=False))),
        "acceptance_by_position": [known(share) for share in acceptance_by_position(evaluation.accepted(), drafts)],
        "references": len(evaluation.references),
        "identical": evaluation.identical,
        "largest_regret": max(evaluation.regrets),
        "seconds": round(evaluation.seconds, 2),
    }


def regrets(target: Target, against: list[Reference], decoded: list[Decoded]) -> list[float]:
    """Return how far from a choice of the target's own each response is, see `speculative.regret`; 0 where it is the reference."""
    return [
        0.0 if d.tokens == r.tokens else regret(target, r.prompt, d.tokens)
        for d, r in zip(decoded, against, strict=True)
    ]


def raw(evaluations: dict[str, Evaluation]) -> dict[str, Any]:
    """Return what was measured, in JSON's types, before any mean is taken; all evaluations have the same references."""
    against = next(iter(evaluations.values())).references
    return {
        "references": [{"prompt_tokens": len(r.prompt), "tokens": len(r.tokens), "loops": r.loops} for r in against],
        "drafters": {
            name: [
                {
                    "accepted": d.accepted,
                    "identical": d.tokens == r.tokens,
                    "regret": far,
                    "target_forwards": d.target_passes,
                    "drafter_forwards": d.draft_passes,
                }
                for d, r, far in zip(evaluation.decoded, evaluation.references, evaluation.regrets, strict=True)
            ]
            for name, evaluation in evaluations.items()
        },
    }


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
            "largest_regret": max(r["regret"] for r in responses),
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
        "drafters": drafters,
    }
