"""Speculative decoding, greedy or sampled, and the acceptance length it is judged by.

A draft is accepted if it is the token that the target chooses there: its likeliest, or the one that it samples. Every token of a
response is so the target's own choice, and its distribution the target's. As a drafter here drafts one token a slot, and not a
distribution, this accepts as often as rejection sampling would (Leviathan et al. 2023, section 2.3, with all of ``q`` on one token).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from drafter import Drafter, KeysValues
from target import Target, choose


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
        # A target in bfloat16 may have a drafter in float32: what goes from one to the other changes its precision.
        dtype = self._drafter.norm.weight.dtype
        new = self._drafter.context(
            features.to(dtype), torch.arange(start - features.shape[1], start, device=features.device).unsqueeze(0)
        )
        self._context = self._drafter.keep(self._context, new)
        self._block[0, 0] = known[-1]
        embeddings = torch.nn.functional.embedding(self._block, self._vocabulary.embedding).to(dtype)
        normed = self._drafter.draft(embeddings, start, self._context)
        return self._target.logits(normed[0, 1:].to(self._vocabulary.head.dtype)).argmax(-1)


@dataclass(frozen=True)
class Sampling:
    """How the target chooses its tokens.

    Attributes:
        temperature: 0 for the likeliest token; otherwise tokens are drawn from ``softmax(logits / temperature)``.
        noise: float32 ``[new tokens]``, uniform in [0, 1), on the target's device: what each place of the response is drawn with,
            in whichever pass. The same noise gives the same response, with drafts and without.
    """

    temperature: float
    noise: Tensor

    def choose(self, logits: Tensor, place: int) -> Tensor:
        """Return the tokens, int64 ``[rows]``, that logits ``[rows, V]`` give for places ``place``, ``place + 1``, ... of the response."""
        if self.temperature == 0:
            return logits.argmax(-1)
        # A block may reach past the end of the response; what is chosen there is dropped.
        places = torch.arange(place, place + len(logits), device=logits.device).clamp(max=len(self.noise) - 1)
        return choose(logits, self.noise.new_full((len(logits),), self.temperature), self.noise[places])


GREEDY = Sampling(0.0, torch.zeros(0))


@dataclass(frozen=True)
class Decoded:
    """One response.

    Attributes:
        tokens: the new tokens.
        accepted: for each cycle, one less than the tokens it added: how many drafts the target agreed with, without those past the
            end of the response, which are thrown away.
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


def greedy(target: Target, prompt: Tensor, new_tokens: int) -> list[int]:
    """Return the target's likeliest continuation, as `decode` does."""
    return decode(target, prompt, new_tokens)


@torch.no_grad()
def decode(target: Target, prompt: Tensor, new_tokens: int, sampling: Sampling = GREEDY) -> list[int]:
    """Return the target's own continuation of ``prompt`` (int64 ``[P]``), one token a pass, up to the end of text."""
    cache = target.new_cache()
    step = prompt.unsqueeze(0)
    tokens: list[int] = []
    while len(tokens) < new_tokens and not _ended(target, tokens):
        step = sampling.choose(target.logits(target.forward(step, cache).normed[:, -1]), len(tokens)).unsqueeze(0)
        tokens.append(int(step))
    return tokens


@torch.no_grad()
def speculate(
    target: Target,
    proposer: Proposer,
    prompt: Tensor,
    new_tokens: int,
    sampling: Sampling = GREEDY,
    *,
    check: Callable[[], None] = lambda: None,
) -> Decoded:
    """Decode like `decode`, with drafts: the tokens are the same wherever a pass over one token and one over a block give the
    same choice, as they do in float32 but for exact near-ties.

    Each cycle drafts a block after the anchor, lets the target read anchor and drafts in one pass, and accepts the drafts up
    to the first that the target would not have chosen itself; the target's choice there is the next anchor.
    A cycle yields what equation 1 of the paper counts.

    Where the refused drafts cannot be taken out of the target's cache, a copy of it from before the block reads what was accepted once
    more: a pass more in each cycle with a refusal, which is counted.

    Args:
        target: the target; its device is where everything happens.
        proposer: a fresh one for each request.
        prompt: int64 ``[P]``.
        new_tokens: length of the response, unless the end of text comes first.
        sampling: how the target chooses.
        check: called before each cycle; may raise to give up.
    """
    target_passes, draft_passes = target.passes, proposer.passes
    cache = target.new_cache()
    known = prompt.tolist()
    features = target.forward(prompt.unsqueeze(0), cache)
    tapped = features.tapped
    anchor = sampling.choose(target.logits(features.normed[0, -1:]), 0)
    tokens = [int(anchor)]
    accepted: list[int] = []
    while len(tokens) < new_tokens and not _ended(target, tokens):
        check()
        drafts = proposer.propose(known + tokens, tapped)
        block = torch.cat((anchor, drafts))
        before = None if target.croppable else copy.deepcopy(cache)
        features = target.forward(block.unsqueeze(0), cache)
        chosen = sampling.choose(target.logits(features.normed[0]), len(tokens))
        # All that the host must know of a cycle comes in one copy: each waits for the device, which then has nothing to do.
        read = torch.cat((drafts, chosen)).tolist()
        proposed, own = read[: len(drafts)], read[len(drafts) :]
        agreed = next(
            (i for i, (draft, token) in enumerate(zip(proposed, own, strict=False)) if draft != token), len(proposed)
        )
        fresh, anchor = own[: agreed + 1], chosen[agreed : agreed + 1]
        end = next((i for i, token in enumerate(fresh) if token in target.language.eos_ids), len(fresh))
        kept = fresh[: end + 1][: new_tokens - len(tokens)]
        tokens += kept
        accepted.append(len(kept) - 1)
        # The refused drafts leave the cache; crop() takes the number to remove as a negative, and 0 would be no number.
        if refused := len(drafts) - agreed:
            if before is None:
                cache.crop(-refused)
            else:
                cache = before
                target.forward(block[: agreed + 1].unsqueeze(0), cache)
        tapped = features.tapped[:, : agreed + 1]
    return Decoded(tokens, accepted, target.passes - target_passes, proposer.passes - draft_passes)


@dataclass(frozen=True)
class Regret:
    """How far the tokens of a greedy response are from the likeliest, by one pass over all of it.

    Attributes:
        gaps: of each token whose logit is not the largest, how far it is below.
        units: the same, in units in the last place of that largest logit, in the precision of the target's logits.
    """

    gaps: tuple[float, ...] = ()
    units: tuple[float, ...] = ()

    @property
    def largest(self) -> float:
        """The largest gap; 0 without any."""
        return largest(self.gaps)


def largest(values: Sequence[float]) -> float:
    """Return the largest, 0 of none; what is not a number counts as larger than all, and is not passed over."""
    return max(values, key=lambda value: (math.isnan(value), value), default=0.0)


NO_REGRET = Regret()


@torch.no_grad()
def regret(target: Target, prompt: Tensor, tokens: list[int]) -> Regret:
    """Return how far below the largest logits the tokens of a greedy response are.

    They are not but for rounding: in bfloat16 a pass over one token, over a block and over a text may disagree about near-ties, so
    that equality with plain decoding is too much to ask for there, and a small regret is not.

    Args:
        target: the target.
        prompt: int64 ``[P]``.
        tokens: the response, at least one token.
    """
    response = torch.tensor(tokens, device=prompt.device)
    tokens_read = torch.cat((prompt, response[:-1])).unsqueeze(0)
    # Passes with a cache are never compiled: each length of a response would be a graph of its own.
    normed = target.forward(tokens_read, target.new_cache()).normed[0, len(prompt) - 1 :]
    logits = target.logits(normed)
    top = logits.float().amax(-1)
    gaps = top - logits.float().gather(1, response.unsqueeze(1)).squeeze(1)
    # frexp's mantissas are from 0.5 to 1: a number's unit in the last place is eps times its power of two below.
    units = torch.ldexp(torch.full_like(top, torch.finfo(logits.dtype).eps), top.frexp().exponent - 1)
    # Not "above 0", which would leave out what is not a number.
    other = ~(gaps <= 0)
    return Regret(tuple(gaps[other].tolist()), tuple((gaps / units)[other].tolist()))


def _ended(target: Target, tokens: list[int]) -> bool:
    return bool(tokens) and tokens[-1] in target.language.eos_ids
