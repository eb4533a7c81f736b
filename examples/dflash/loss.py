"""The training loss, computed in chunks so that logits of the whole batch never exist at once.

At the paper's sizes the logits of 512 blocks of 16 rows over 248,320 ids take 8.1 GB in float32; those of one chunk of 512
rows take 0.51 GB. Each chunk is checkpointed: its logits are made again in the backward instead of being kept.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from backend import BACKEND
from safecompile import checkpoint, thread_safe_compile


@thread_safe_compile(backend=BACKEND, dynamic=False)
def chunk_loss(
    draft_normed: Tensor, target_normed: Tensor, counted: Tensor, head: Tensor, kl_weight: Tensor, labels: Tensor
) -> Tensor:
    """Return the weighted sum of a chunk's losses, ``(1 - a) CE(label) + a KL(target || draft)``, float32 scalar.

    The cross entropy, weighted by equation 4, is the paper's loss (section 4.2); the divergence is this example's addition.

    Args:
        draft_normed: ``[batch, rows, D]``, the drafter's output after its last norm.
        target_normed: ``[batch, rows, D]``, the target's output after its last norm at the position that predicts the label.
        counted: float32 ``[batch, rows]``, what each row counts for (paper, equation 4), which may be nothing.
        head: ``[V, D]``, the target's frozen output projection.
        kl_weight: ``a`` as a float32 scalar tensor; a Python float would be compiled in, with a recompile for each new value.
        labels: int64 ``[batch, rows]``.
    """
    draft = nn.functional.linear(draft_normed, head).float().log_softmax(-1)
    with torch.no_grad():
        target = nn.functional.linear(target_normed, head).float().log_softmax(-1)
    cross_entropy = -draft.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    divergence = (target.exp() * (target - draft)).sum(-1)
    losses = (1 - kl_weight) * cross_entropy + kl_weight * divergence
    return (losses * counted).sum()


def chunked_loss(
    draft_normed: Tensor,
    target_normed: Tensor,
    weights: Tensor,
    mask: Tensor,
    head: Tensor,
    kl_weight: Tensor,
    labels: Tensor,
    *,
    chunk_rows: int,
) -> Tensor:
    """Return the weighted mean loss over all rows, float32 scalar; without any row that counts, it is 0.

    Args:
        weights: float32 ``[rows]`` (paper, equation 4).
        mask: bool ``[batch, rows]``, the rows that count.
        chunk_rows: rows whose logits exist at once.
        draft_normed, target_normed, head, kl_weight, labels: as in `chunk_loss`, with ``N * B`` rows.
    """
    counted = weights * mask
    total = draft_normed.new_zeros((), dtype=torch.float32)
    for start in range(0, draft_normed.shape[1], chunk_rows):
        rows = slice(start, start + chunk_rows)
        total = total + checkpoint(
            chunk_loss,
            draft_normed[:, rows],
            target_normed[:, rows],
            counted[:, rows],
            head,
            kl_weight,
            labels[:, rows],
        )
    return total / counted.sum().clamp(min=torch.finfo(torch.float32).tiny)
