"""Greedy speculative decoding, and the acceptance length it is judged by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

import data
from drafter import Drafter, KeysValues
from target import Target


class Proposer(Protocol):
    """Something that drafts tokens for one request."""

    def propose(self, anchor: int, start: int, features: Tensor) -> Tensor:
        """Draft the tokens after the anchor.

        Args:
            anchor: the newest token, which the target has chosen and not yet read.
            start: the anchor's position.
            features: ``[1, new, taps * D]``, the target's features of the tokens before ``start`` not handed in before.

        Returns:
            int64 ``[drafts]``.
        """
        ...


class DFlashProposer:
    """Draft a whole block with one pass of the drafter, keeping the context's keys and values between passes."""

    def __init__(self, drafter: Drafter, target: Target, block_size: int) -> None:
        self._drafter = drafter
        self._target = target
        self._vocabulary = target.vocabulary(target.device)
        self._block = torch.full((1, block_size), data.MASK_ID, device=target.device)
        self._slots = torch.arange(block_size, device=target.device).unsqueeze(0)
        self._context: list[KeysValues] = []

    @torch.no_grad()
    def propose(self, anchor: int, start: int, features: Tensor) -> Tensor:
        """See `Proposer`. The block's own keys and values are not kept; everything kept is before the block, so all is visible."""
        known = torch.arange(start - features.shape[1], start, device=features.device).unsqueeze(0)
        new = self._drafter.context(features, known)
        self._context = [_append(old, more) for old, more in zip(self._context, new, strict=True)] if self._context else new
        self._block[0, 0] = anchor
        embeddings = torch.nn.functional.embedding(self._block, self._vocabulary.embedding)
        normed = self._drafter.blocks(embeddings, self._slots + start, self._context, None)
        return self._target.logits(normed[0, 1:]).argmax(-1)


@dataclass(frozen=True)
class Decoded:
    """One response.

    Attributes:
        tokens: the new tokens.
        accepted: for each cycle, how many drafted tokens the target agreed with.
        target_passes, draft_passes: forward passes made, the prompt's included.
    """

    tokens: list[int]
    accepted: list[int]
    target_passes: int
    draft_passes: int

    @property
    def acceptance_length(self) -> float:
        """Mean number of tokens a cycle yields, the target's own included: from 1 to the block size (paper, equation 1)."""
        return sum(a + 1 for a in self.accepted) / len(self.accepted)


@torch.no_grad()
def greedy(target: Target, prompt: Tensor, new_tokens: int) -> list[int]:
    """Return the target's own continuation of ``prompt`` (int64 ``[P]``), one token a pass, up to the end of text."""
    cache = target.new_cache()
    step = prompt.unsqueeze(0)
    tokens: list[int] = []
    while len(tokens) < new_tokens and data.EOS_ID not in tokens[-1:]:
        step = target.logits(target.forward(step, cache).normed[:, -1:]).argmax(-1)
        tokens.append(int(step))
    return tokens


@torch.no_grad()
def speculate(target: Target, proposer: Proposer, prompt: Tensor, new_tokens: int) -> Decoded:
    """Decode like `greedy`, with drafts: the tokens are the same wherever a pass over one token and one over a block give the
    same argmax, as they do in float32 but for exact near-ties.

    Each cycle drafts a block after the anchor, lets the target read anchor and drafts in one pass, and accepts the drafts up
    to the first that the target would not have chosen itself; the target's choice there is the next anchor.

    Args:
        target: the target; its device is where everything happens.
        proposer: a fresh one for each request.
        prompt: int64 ``[P]``.
        new_tokens: length of the response, unless the end of text comes first.
    """
    cache = target.new_cache()
    features = target.forward(prompt.unsqueeze(0), cache)
    anchor = int(target.logits(features.normed[0, -1]).argmax())
    tapped = features.tapped
    start = len(prompt)
    tokens = [anchor]
    accepted: list[int] = []
    while len(tokens) < new_tokens and tokens[-1] != data.EOS_ID:
        drafts = proposer.propose(anchor, start, tapped)
        block = torch.cat((drafts.new_tensor([anchor]), drafts))
        features = target.forward(block.unsqueeze(0), cache)
        chosen = target.logits(features.normed[0]).argmax(-1)
        agreed = int((drafts == chosen[:-1]).cumprod(0).sum())
        anchor = int(chosen[agreed])
        fresh = [*drafts[:agreed].tolist(), anchor]
        if data.EOS_ID in fresh:
            fresh = fresh[: fresh.index(data.EOS_ID) + 1]
        tokens += fresh
        accepted.append(agreed)
        start += agreed + 1
        # The refused drafts leave the cache; crop() takes the number to remove as a negative, and 0 would be no number.
        if refused := len(drafts) - agreed:
            cache.crop(-refused)
        tapped = features.tapped[:, : agreed + 1]
    return Decoded(tokens[:new_tokens], accepted, target_passes=1 + len(accepted), draft_passes=len(accepted))


def _append(old: KeysValues, new: KeysValues) -> KeysValues:
    return torch.cat((old[0], new[0]), dim=2), torch.cat((old[1], new[1]), dim=2)
