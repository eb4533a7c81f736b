"""What a draft block is: anchors, inputs, positions, labels and weights.

A block of size ``B`` starts at an anchor, a clean token of the sequence. Slot 0 holds that token, slots 1 to ``B - 1`` hold
the mask token, and the output of slot ``k`` predicts the token *at* position ``anchor + k``: nothing is shifted, and one pass
drafts ``B - 1`` tokens (paper, section 4.2 and Figure 4). Below, ``N`` blocks lie one after the other in ``N * B`` rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sample_anchors(
    loss_mask: Tensor, count: int, generators: Sequence[torch.Generator], documents: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw each sequence's anchors (paper, section 4.2): different ones, sorted, uniform over those with something to predict.

    A position can be an anchor if it and the next one are supervised, in one document. There are always ``count`` slots, because a constant
    shape needs no new compile; those that cannot be filled are padding.

    Args:
        loss_mask: bool ``[batch, S]``, the supervised tokens.
        count: ``N``.
        generators: one for each sequence.
        documents: as in `attention.mask_rule`.

    Returns:
        anchors: int64 ``[batch, N]``.
        keep: bool ``[batch, N]``, False on padding.
    """
    anchors = torch.zeros(len(loss_mask), count, dtype=torch.long)
    keep = torch.zeros(len(loss_mask), count, dtype=torch.bool)
    possible = loss_mask[:, :-1] & loss_mask[:, 1:]
    if documents is not None:
        possible = possible & (documents[:, :-1] == documents[:, 1:])
    for row, (candidate, rng) in enumerate(zip(possible.cpu(), generators, strict=True)):
        candidates = candidate.nonzero().flatten()
        order = torch.randperm(len(candidates), generator=rng)[:count]
        chosen = candidates[order].sort().values
        anchors[row, : len(chosen)] = chosen
        keep[row, : len(chosen)] = True
    return anchors.to(loss_mask.device), keep.to(loss_mask.device)


def positions(anchors: Tensor, block_size: int) -> Tensor:
    """Return each row's absolute position ``anchor + k``, int64 ``[batch, N * B]``, from anchors ``[batch, N]`` (Figure 4)."""
    slots = torch.arange(block_size, device=anchors.device)
    return (anchors.unsqueeze(-1) + slots).flatten(1)


def input_tokens(tokens: Tensor, anchors: Tensor, block_size: int, mask_id: int) -> Tensor:
    """Return the drafter's input ids, int64 ``[batch, N * B]``: the anchor's token, then mask tokens (paper, section 4.2).

    Args:
        tokens: int64 ``[batch, S]``.
        anchors: int64 ``[batch, N]``.
        block_size: ``B``.
        mask_id: id of the mask token.
    """
    inputs = torch.full((*anchors.shape, block_size), mask_id, dtype=torch.long, device=tokens.device)
    inputs[..., 0] = tokens.gather(1, anchors)
    return inputs.flatten(1)


def slot_weights(block_size: int, gamma: float) -> Tensor:
    """Return ``exp(-(k - 1) / gamma)`` for slots ``k >= 1`` and 0 for slot 0, float32 ``[B]`` (paper, equation 4)."""
    slots = torch.arange(block_size, dtype=torch.float32)
    return torch.exp(-(slots - 1) / gamma) * (slots > 0)


def dpace_weights(confidence: Tensor, counts: Tensor, alpha: Tensor) -> Tensor:
    """Return D-PACE's weights of the slots of each block, float32 ``[..., B - 1]`` (arXiv 2605.18810, equations 7 and 8).

    With the smoothed confidence ``s = (1 - alpha) q + alpha``, slot ``j`` weighs ``sum over m >= j of the product over i <= m of s_i``:
    what it adds to the accepted length that is expected. A slot that does not count weighs nothing, has a factor of 1 in the products and is left
    out of the sums, as in SpecForge (``_dpace_weight``), speculators (``dpace_loss_decay``) and Model-Optimizer (``_dpace_position_weights``).

    Args:
        confidence: ``q = exp(-CE)``, float32 ``[..., B - 1]``, the drafter's probability of each label; also where the loss is a divergence,
            as in Model-Optimizer.
        counts: bool ``[..., B - 1]``.
        alpha: float32 scalar; at 1 the weights of a block that counts as a whole are ``B - j``, whatever the confidence.
    """
    smoothed = torch.where(counts, (1 - alpha) * confidence + alpha, 1.0)
    reached = smoothed.cumprod(-1) * counts
    return reached.flip(-1).cumsum(-1).flip(-1) * counts


def shares(correct: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return how well each draft slot was drafted; NaN where no block counts.

    Args:
        correct: bool ``[batch, N, B - 1]``.
        counts: bool ``[batch, N, B - 1]``.

    Returns:
        accuracy: float32 ``[B - 1]``, the share of the rows that count that are correct.
        acceptance: float32 ``[B - 1]``, the share of blocks in which the slot and all before it are correct, of those in which all these
            count: what equation 1 of the paper counts when decoding, here with the data's tokens for the target's.
    """
    right = correct & counts
    of = torch.stack((right, counts, right.cumprod(-1), counts.cumprod(-1))).sum((1, 2))
    return of[0] / of[1], of[2] / of[3]


def labels(
    tokens: Tensor,
    loss_mask: Tensor,
    anchors: Tensor,
    keep: Tensor,
    block_size: int,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return each row's label and whether it counts (paper, section 4.2: a slot predicts the token at its own position).

    Row ``k`` of a block is labelled with the token at ``anchor + k``. It counts if the block is kept, ``k > 0``, that
    position is inside the sequence, and its token is supervised and of the anchor's document.

    Args:
        tokens: int64 ``[batch, S]``.
        loss_mask: bool ``[batch, S]``.
        anchors, keep: ``[batch, N]``, from `sample_anchors`.
        block_size: ``B``.
        documents: as in `attention.mask_rule`.

    Returns:
        labels: int64 ``[batch, N * B]``; where a row does not count, any valid id.
        mask: bool ``[batch, N * B]``.
    """
    length = tokens.shape[1]
    at = positions(anchors, block_size)
    inside = at.clamp(max=length - 1)
    predicts = torch.arange(block_size, device=tokens.device).repeat(anchors.shape[1]) > 0
    mask = keep.repeat_interleave(block_size, dim=1) & predicts & (at < length) & loss_mask.gather(1, inside)
    if documents is not None:
        mask = mask & (documents.gather(1, inside) == documents.gather(1, anchors).repeat_interleave(block_size, dim=1))
    return tokens.gather(1, inside), mask


def drafted(rows: Tensor, block_size: int) -> Tensor:
    """Leave each block's slot 0 out, which predicts nothing: ``[batch, N * B, ...]`` to ``[batch, N * (B - 1), ...]``."""
    return rows.unflatten(1, (-1, block_size))[:, :, 1:].flatten(1, 2)


def teacher_rows(target_hidden: Tensor, anchors: Tensor, block_size: int) -> Tensor:
    """Return the target's hidden state that predicts each row's label: the one at ``anchor + k - 1``.

    The target's output at a position predicts the next token, so this is where the divergence of `loss.chunk_loss` compares.

    Args:
        target_hidden: ``[batch, S, D]``.
        anchors: int64 ``[batch, N]``.
        block_size: ``B``.

    Returns:
        ``[batch, N * B, D]``; where a row does not count, some hidden state of the same sequence.
    """
    at = (positions(anchors, block_size) - 1).clamp(0, target_hidden.shape[1] - 1)
    return target_hidden.gather(1, at.unsqueeze(-1).expand(-1, -1, target_hidden.shape[-1]))
