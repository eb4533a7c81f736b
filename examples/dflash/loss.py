"""The training loss, computed in chunks so that logits of the whole batch never exist at once.

At the paper's sizes the logits of 512 blocks of 16 rows over 248,320 ids take 8.1 GB in float32; those of one chunk of 512
rows take 0.51 GB. What the backward needs of a chunk is made in one of two ways:

- ``recomputed``: each chunk is checkpointed, its logits are made again in the backward. Works with any loss, under any
  transformation of the backward, and costs one more product with the head.
- ``in_forward``: the gradient of each chunk with respect to the drafter's output is made right after its loss and kept, a row
  of ``D`` numbers instead of ``V``. No logits are made twice; the backward only scales.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from backend import BACKEND
from safecompile import checkpoint, thread_safe_compile

Gradient = Literal["recomputed", "in_forward"]
GRADIENTS: tuple[Gradient, ...] = get_args(Gradient)


@thread_safe_compile(backend=BACKEND, dynamic=False)
def chunk_loss(
    draft_normed: Tensor,
    target_normed: Tensor | None,
    counted: Tensor,
    head: Tensor,
    kl_weight: Tensor,
    labels: Tensor,
) -> Tensor:
    """Return the weighted sum of a chunk's losses, ``(1 - a) CE(label) + a KL(target || draft)``, float32 scalar.

    The cross entropy, weighted by equation 4, is the paper's loss (section 4.2); the divergence is this example's addition.

    Args:
        draft_normed: ``[batch, rows, D]``, the drafter's output after its last norm.
        target_normed: ``[batch, rows, D]``, the target's output after its last norm at the position that predicts the label;
            None leaves the divergence out, and the product with the head that it takes.
        counted: float32 ``[batch, rows]``, what each row counts for (paper, equation 4), which may be nothing.
        head: ``[V, D]``, the target's frozen output projection.
        kl_weight: ``a`` as a float32 scalar tensor; a Python float would be compiled in, with a recompile for each new value.
        labels: int64 ``[batch, rows]``.
    """
    logits = nn.functional.linear(draft_normed, head).float()
    # The backward of this picks the labels by comparison; that of a gather would write a matrix of zeros first.
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    if target_normed is not None:
        with torch.no_grad():
            target = nn.functional.linear(target_normed, head).float().log_softmax(-1)
        divergence = (target.exp() * (target - logits.log_softmax(-1))).sum(-1)
        losses = (1 - kl_weight) * losses + kl_weight * divergence
    return (losses * counted).sum()


def chunked_loss(
    draft_normed: Tensor,
    target_normed: Tensor | None,
    weights: Tensor,
    mask: Tensor,
    head: Tensor,
    kl_weight: Tensor,
    labels: Tensor,
    *,
    chunk_rows: int,
    gradient: Gradient = "recomputed",
) -> Tensor:
    """Return the weighted mean loss over all rows, float32 scalar; without any row that counts, it is 0.

    Args:
        weights: float32 ``[rows]`` (paper, equation 4).
        mask: bool ``[batch, rows]``, the rows that count.
        chunk_rows: rows whose logits exist at once.
        gradient: how the backward gets what it needs of a chunk, see above; the same numbers up to rounding.
        draft_normed, target_normed, head, kl_weight, labels: as in `chunk_loss`, with ``N * B`` rows.
    """
    counted = weights * mask
    # Split, not sliced: the backward of the pieces is one concatenation, that of slices a sum of padded copies.
    pieces = [
        (None,) * (-(-draft_normed.shape[1] // chunk_rows)) if rows is None else rows.split(chunk_rows, dim=1)
        for rows in (draft_normed, target_normed, counted, labels)
    ]
    total = draft_normed.new_zeros((), dtype=torch.float32)
    for draft, target, counts, chunk_labels in zip(*pieces, strict=True):
        chunk = (draft, target, counts, head, kl_weight, chunk_labels)
        if gradient == "recomputed":
            total = total + checkpoint(chunk_loss, *chunk)
        else:
            total = total + _GradientInForward.apply(*chunk)
    return total / counted.sum().clamp(min=torch.finfo(torch.float32).tiny)


class _GradientInForward(torch.autograd.Function):
    """`chunk_loss`, which keeps the gradient with respect to its first argument and nothing else."""

    @staticmethod
    def forward(ctx: Any, draft_normed: Tensor, *others: Any) -> Tensor:
        with torch.enable_grad():
            rows = draft_normed.detach().requires_grad_()
            loss = chunk_loss(rows, *others)
        (gradient,) = torch.autograd.grad(loss, rows)
        ctx.save_for_backward(gradient)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * outer, *[None] * 5)
