"""The training loss, computed in chunks so that logits of the whole batch never exist at once.

At the paper's sizes the logits of 512 blocks of 16 rows over 248,320 ids take 8.1 GB in float32; those of one chunk of 512
rows take 0.51 GB. What the backward needs of a chunk is made in one of two ways:

- ``recomputed``: each chunk is checkpointed, its logits are made again in the backward. Works with any loss, under any
  transformation of the backward, and costs one more product with the head.
- ``in_forward``: the gradient of each chunk with respect to the drafter's output is made right after its loss and kept, a row
  of ``D`` numbers instead of ``V``. No logits are made twice; the backward only scales.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

import blocks
from backend import BACKEND
from safecompile import checkpoint, thread_safe_compile

Gradient = Literal["recomputed", "in_forward"]
GRADIENTS: tuple[Gradient, ...] = get_args(Gradient)


class BlockLoss(NamedTuple):
    """What drafting blocks came to.

    Attributes:
        loss: float32 scalar.
        accuracy, acceptance: float32 ``[B - 1]``, without gradient, see `blocks.shares`.
    """

    loss: Tensor
    accuracy: Tensor
    acceptance: Tensor


@thread_safe_compile(backend=BACKEND, dynamic=False)
def chunk_loss(
    draft_normed: Tensor,
    target_normed: Tensor | None,
    counted: Tensor,
    head: Tensor,
    kl_weight: Tensor,
    labels: Tensor,
    dpace_alpha: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of a chunk's losses, ``(1 - a) CE(label) + a KL(target || draft)``, and which rows are right.

    The cross entropy, weighted by equation 4, is the paper's loss (section 4.2); the divergence is this example's addition.
    D-PACE's weights, see `blocks.dpace_weights`, follow from the cross entropy alone whatever ``a`` is, and no gradient goes
    through them; `chunked_loss` says what the sum is divided by.

    Args:
        draft_normed: ``[batch, rows, D]``, the drafter's output after its last norm.
        target_normed: ``[batch, rows, D]``, the target's output after its last norm at the position that predicts the label;
            None leaves the divergence out, and the product with the head that it takes.
        counted: float32 ``[batch, blocks, B - 1]``, what each row counts for (paper, equation 4; with D-PACE 1), which may be nothing;
            ``rows`` are these slots, block after block.
        head: ``[V, D]``, the target's frozen output projection.
        kl_weight: ``a`` as a float32 scalar tensor; a Python float would be compiled in, with a recompile for each new value.
        labels: int64 ``[batch, rows]``.
        dpace_alpha: D-PACE's smoothing as a float32 scalar tensor; None leaves the weights as they are.

    Returns:
        total: float32 scalar.
        correct: bool ``[batch, blocks, B - 1]``, without gradient: whether no logit is above the label's. A label that ties with
            another id for the largest logit is correct here, though a greedy draft may be the other; logits computed in bfloat16 tie at times.
    """
    logits = nn.functional.linear(draft_normed, head).float().flatten(0, 1)
    label_ids = labels.flatten()
    # The backward of this picks the labels by comparison; that of a gather would write a matrix of zeros first.
    losses = nn.functional.cross_entropy(logits, label_ids, reduction="none").view_as(counted)
    with torch.no_grad():
        # The softmax makes these maxima, too: of the same dimension under the same number, the compiler makes them once.
        largest = logits.amax(1, keepdim=True)
        correct = (logits.gather(1, label_ids.unsqueeze(1)) >= largest).view_as(counted)
        if dpace_alpha is not None:
            counted = blocks.dpace_weights((-losses).exp(), counted > 0, dpace_alpha)
    if target_normed is not None:
        with torch.no_grad():
            target = nn.functional.linear(target_normed, head).float().flatten(0, 1).log_softmax(1)
        divergence = (target.exp() * (target - logits.log_softmax(1))).sum(1).view_as(counted)
        losses = (1 - kl_weight) * losses + kl_weight * divergence
    return (losses * counted).sum(), correct


def chunked_loss(
    draft_normed: Tensor,
    target_normed: Tensor | None,
    weights: Tensor,
    mask: Tensor,
    head: Tensor,
    kl_weight: Tensor,
    labels: Tensor,
    *,
    chunk_blocks: int,
    gradient: Gradient = "recomputed",
    dpace_alpha: Tensor | None = None,
) -> BlockLoss:
    """Return the loss of all blocks, and how well their slots were drafted; without any row that counts, the loss is 0.

    It is the weighted mean over all rows (paper, section 4.2). With D-PACE it is the weighted sum over the number of blocks that count,
    as D-PACE's author asks for in SpecForge's issue 828: its weights add up to more the better the drafter is, which a mean would take
    out. So D-PACE's loss need not fall while the drafter gets better.

    Args:
        weights: float32 ``[B - 1]`` (paper, equation 4); ones for D-PACE.
        mask: bool ``[batch, rows]``, the rows that count.
        chunk_blocks: blocks of a sequence whose logits exist at once.
        gradient: how the backward gets what it needs of a chunk, see above; the same numbers up to rounding.
        draft_normed, target_normed, head, kl_weight, labels, dpace_alpha: as in `chunk_loss`, with ``N * (B - 1)`` rows.
    """
    slots = len(weights)
    counts = mask.unflatten(1, (-1, slots))
    counted = weights * counts
    chunks = -(-counts.shape[1] // chunk_blocks)
    # Split, not sliced: the backward of the pieces is one concatenation, that of slices a sum of padded copies.
    pieces = [
        (None,) * chunks if rows is None else rows.split(chunk_blocks * slots, dim=1)
        for rows in (draft_normed, target_normed, labels)
    ]
    total = draft_normed.new_zeros((), dtype=torch.float32)
    corrects = []
    for draft, target, chunk_labels, chunk_counted in zip(*pieces, counted.split(chunk_blocks, dim=1), strict=True):
        chunk = (draft, target, chunk_counted, head, kl_weight, chunk_labels, dpace_alpha)
        if gradient == "recomputed":
            part, correct = checkpoint(chunk_loss, *chunk)
        else:
            part, correct = _GradientInForward.apply(*chunk)
        total = total + part
        corrects.append(correct)
    shares = blocks.shares(torch.cat(corrects, dim=1), counts)
    over = counted.sum() if dpace_alpha is None else counts.any(-1).sum().float()
    return BlockLoss(total / over.clamp(min=torch.finfo(torch.float32).tiny), *shares)


class _GradientInForward(torch.autograd.Function):
    """`chunk_loss`, which keeps the gradient with respect to its first argument and nothing else."""

    @staticmethod
    def forward(ctx: Any, draft_normed: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            rows = draft_normed.detach().requires_grad_()
            loss, correct = chunk_loss(rows, *others)
        (gradient,) = torch.autograd.grad(loss, rows)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(correct)
        return loss.detach(), correct

    @staticmethod
    def backward(ctx: Any, outer: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * outer, *[None] * 6)
