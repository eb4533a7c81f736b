"""Greedy speculative decoding, and the acceptance length it is judged by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from drafter import Drafter, KeysValues
from target import Target


class Proposer(Protocol):
    """Something that drafts tokens for one request.

    Attributes:
        passes: forward passes of a drafter made so far.
    """

    passes: int

    def propose(self, known: list[int], features: Tensor) -> Tensor:
        """Draft the tokens that follow.

        Args:
            known: prompt and response so far. The last one is the anchor, which the target has chosen and not yet read.
            features: ``[1, new, taps * D]``, the target's features of the tokens before the anchor not handed in before.

        Returns:
            int64 ``[drafts]``, on the device of ``features``.
        """
        ...


class NGramProposer:
    """Draft what followed the last time the newest tokens occurred: the drafter that needs no training."""

    passes = 0

    def __init__(self, drafts: int, longest: int = 4) -> None:
        self._drafts = drafts
        self._longest = longest

    def propose(self, known: list[int], features: Tensor) -> Tensor:
        """See `Proposer`; the longest repeated end of at most ``longest`` tokens counts."""
        following: list[int] = []
        for size in range(min(self._longest, len(known) - 1), 0, -1):
            end = known[-size:]
            starts = range(len(known) - size - 1, -1, -1)
            if (match := next((s for s in starts if known[s : s + size] == end), None)) is not None:
                following = known[match + size : match + size + self._drafts]
                break
        filled = following + [0] * (self._drafts - len(following))
        return torch.tensor(filled, device=features.device)


class DFlashProposer:
    """Draft a whole block with one pass of the drafter, keeping the context's keys and values between passes."""

    def __init__(self, drafter: Drafter, target: Target, block_size: int) -> None:
        self._drafter = drafter
        self._target = target
        self.passes = 0
        self._vocabulary = target.vocabulary(target.device)
        self._block = torch.full((1, block_size), target.language.mask_id, device=target.device)
        self._context: list[KeysValues] = []

    @torch.no_grad()
    def propose(self, known: list[int], features: Tensor) -> Tensor:
        """See `Proposer`. Keys and values of the block are not kept: all that is kept lies before the next block.

        The block is the anchor and mask tokens at absolute positions; slot ``k``'s output predicts the token at its own position
        (paper, section 4.2).
        """
        self.passes += 1
        start = len(known) - 1
        new = self._drafter.context(
            features, torch.arange(start - features.shape[1], start, device=features.device).unsqueeze(0)
        )
        self._context = self._drafter.keep(self._context, new)
        self._block[0, 0] = known[-1]
        embeddings = torch.nn.functional.embedding(self._block, self._vocabulary.embedding)
        normed = self._drafter.draft(embeddings, start, self._context)
        return self._target.logits(normed[0, 1:]).argmax(-1)


@dataclass(frozen=True)
class Decoded:
    """One response.

    Attributes:
        tokens: the new tokens.
        accepted: for each cycle, how many drafted tokens the target agreed with.
        target_passes, draft_passes: forward passes counted where they are made, the prompt's included.
    """

    tokens: list[int]
    accepted: list[int]
    target_passes: int
    draft_passes: int


def acceptance_length(accepted: list[int]) -> float:
    """Return tau of one response: the mean number of tokens a cycle yields (paper, equation 1).

    Each cycle yields the accepted drafts and the target's own token after them, so that tau goes from 1 to the block size.
    """
    return sum(a + 1 for a in accepted) / len(accepted)


@torch.no_grad()
def greedy(target: Target, prompt: Tensor, new_tokens: int) -> list[int]:
    """Return the target's own continuation of ``prompt`` (int64 ``[P]``), one token a pass, up to the end of text."""
    cache = target.new_cache()
    step = prompt.unsqueeze(0)
    tokens: list[int] = []
    while len(tokens) < new_tokens and not _ended(target, tokens):
        step = target.logits(target.forward(step, cache).normed[:, -1:]).argmax(-1)
        tokens.append(int(step))
    return tokens


@torch.no_grad()
def speculate(target: Target, proposer: Proposer, prompt: Tensor, new_tokens: int) -> Decoded:
    """Decode like `greedy`, with drafts: the tokens are the same wherever a pass over one token and one over a block give the
    same argmax, as they do in float32 but for exact near-ties.

    Each cycle drafts a block after the anchor, lets the target read anchor and drafts in one pass, and accepts the drafts up
    to the first that the target would not have chosen itself; the target's choice there is the next anchor.
    A cycle yields what equation 1 of the paper counts.

    Args:
        target: the target; its device is where everything happens.
        proposer: a fresh one for each request.
        prompt: int64 ``[P]``.
        new_tokens: length of the response, unless the end of text comes first.
    """
    target_passes, draft_passes = target.passes, proposer.passes
    cache = target.new_cache()
    known = prompt.tolist()
    features = target.forward(prompt.unsqueeze(0), cache)
    tapped = features.tapped
    tokens = [int(target.logits(features.normed[0, -1]).argmax())]
    accepted: list[int] = []
    while len(tokens) < new_tokens and not _ended(target, tokens):
        drafts = proposer.propose(known + tokens, tapped)
        block = torch.cat((drafts.new_tensor(tokens[-1:]), drafts))
        features = target.forward(block.unsqueeze(0), cache)
        chosen = target.logits(features.normed[0]).argmax(-1)
        agreed = int((drafts == chosen[:-1]).cumprod(0).sum())
        fresh = [*drafts[:agreed].tolist(), int(chosen[agreed])]
        end = next((i for i, token in enumerate(fresh) if token in target.language.eos_ids), len(fresh))
        tokens += fresh[: end + 1]
        accepted.append(agreed)
        # The refused drafts leave the cache; crop() takes the number to remove as a negative, and 0 would be no number.
        if refused := len(drafts) - agreed:
            cache.crop(-refused)
        tapped = features.tapped[:, : agreed + 1]
    return Decoded(tokens[:new_tokens], accepted, target.passes - target_passes, proposer.passes - draft_passes)


def _ended(target: Target, tokens: list[int]) -> bool:
    return bool(tokens) and tokens[-1] in target.language.eos_ids
