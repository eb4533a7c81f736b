"""Evaluation on held-out text: acceptance length, and whether the output is the target's own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

import data
from config import Config
from speculative import Decoded, Proposer, greedy, speculate
from target import Target

LOOP_WINDOW = 64
LOOP_PERIOD = 32


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
    """

    references: list[Reference]
    decoded: list[Decoded]
    seconds: float

    @property
    def identical(self) -> int:
        """Responses that are the target's own, token for token."""
        return sum(d.tokens == r.tokens for d, r in zip(self.decoded, self.references, strict=True))

    @property
    def target_passes(self) -> int:
        """Forward passes of the target, all prompts together."""
        return sum(d.target_passes for d in self.decoded)

    def acceptance_length(self, *, with_loops: bool) -> float:
        """Return the mean over the responses of each response's mean (paper, equation 1); not a number without any.

        Args:
            with_loops: count responses that end in a loop, too.
        """
        counted = zip(self.decoded, self.references, strict=True)
        lengths = [d.acceptance_length for d, r in counted if d.accepted and (with_loops or not r.loops)]
        return sum(lengths) / len(lengths) if lengths else math.nan


def references(config: Config, held_out: Tensor, target: Target) -> list[Reference]:
    """Draw the prompts and decode them with the target alone.

    At most half of the responses may loop: a prompt whose response would be one more is passed over. There may be fewer than
    ``config.eval_prompts`` if the target loops nearly always.
    """
    found: list[Reference] = []
    for i in range(4 * config.eval_prompts):
        if len(found) == config.eval_prompts:
            break
        rng = data.generator(config.seed, "evaluation", i)
        prompt = data.window(held_out, config.eval_prompt_length, rng).to(target.device)
        reference = Reference(prompt, greedy(target, prompt, config.eval_new_tokens))
        if not reference.loops or sum(r.loops for r in found) < config.eval_prompts // 2:
            found.append(reference)
    return found


def evaluate(config: Config, target: Target, proposer: Callable[[], Proposer], against: list[Reference]) -> Evaluation:
    """Decode every reference's prompt with drafts.

    Args:
        config: for the length of responses.
        target: the target the references were made with.
        proposer: makes a fresh proposer for each prompt.
        against: from `references`.
    """
    started = time.monotonic()
    decoded = [speculate(target, proposer(), r.prompt, config.eval_new_tokens) for r in against]
    return Evaluation(against, decoded, time.monotonic() - started)
