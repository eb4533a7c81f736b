"""Evaluation on held-out text: acceptance length, and whether the output is the target's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

import data
from config import Config
from speculative import Decoded, Proposer, greedy, speculate
from target import Target


@dataclass(frozen=True)
class Reference:
    """A held-out prompt, int64 ``[P]``, and the target's own greedy continuation."""

    prompt: Tensor
    tokens: list[int]


@dataclass(frozen=True)
class Evaluation:
    """Results over all prompts.

    Attributes:
        acceptance_length: mean over the responses of each response's mean (paper, equation 1).
        identical, total: responses that are the target's own token for token, and all.
        target_passes, draft_passes: forward passes of both models.
        seconds: wall time.
    """

    acceptance_length: float
    identical: int
    total: int
    target_passes: int
    draft_passes: int
    seconds: float


def references(config: Config, held_out: Tensor, target: Target) -> list[Reference]:
    """Draw the prompts and decode them with the target alone."""
    found = []
    for i in range(config.eval_prompts):
        prompt = data.window(held_out, config.eval_prompt_length, data.generator(config.seed, "evaluation", i))
        prompt = prompt.to(target.device)
        found.append(Reference(prompt, greedy(target, prompt, config.eval_new_tokens)))
    return found


def evaluate(
    config: Config, target: Target, proposer: Callable[[], Proposer], against: list[Reference]
) -> Evaluation:
    """Decode every reference's prompt with drafts and compare.

    Args:
        config: for the length of responses.
        target: the target the references were made with.
        proposer: makes a fresh proposer for each prompt.
        against: from `references`.
    """
    started = time.monotonic()
    decoded: list[Decoded] = [speculate(target, proposer(), r.prompt, config.eval_new_tokens) for r in against]
    lengths = [d.acceptance_length for d in decoded if d.accepted]
    return Evaluation(
        acceptance_length=sum(lengths) / len(lengths) if lengths else float("nan"),
        identical=sum(d.tokens == r.tokens for d, r in zip(decoded, against, strict=True)),
        total=len(against),
        target_passes=sum(d.target_passes for d in decoded),
        draft_passes=sum(d.draft_passes for d in decoded),
        seconds=time.monotonic() - started,
    )
