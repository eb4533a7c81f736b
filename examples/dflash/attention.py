"""Attention of the drafter: one rule for who may see what, as a dense mask or as a flex block mask.

Keys are the context's ``S`` tokens followed by the ``N`` blocks of ``B`` rows; queries are the blocks' rows only
(paper, Figure 4 and section A.3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from backend import BACKEND
from safecompile import thread_safe_compile

Mask: TypeAlias = Tensor | BlockMask
"""A dense bool mask ``[batch, 1, N * B, S + N * B]`` (True: visible), or the same as a flex block mask."""

MaskRule: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def mask_rule(anchors: Tensor, keep: Tensor, context_length: int, block_size: int) -> MaskRule:
    """Return the rule ``(batch, head, query, key) -> may attend`` on index tensors of any broadcastable shapes.

    A row of the block at anchor ``a`` sees the context *strictly* before ``a`` and every row of its own block, in both
    directions. The anchor's own context entry stays hidden: when drafting, the anchor is the token the target has just
    chosen and not yet read, so no feature of it exists (paper, Figure 4).

    Args:
        anchors: int64 ``[batch, N]``, positions in the context.
        keep: bool ``[batch, N]``; rows of a block that is not kept (padding) see nothing.
        context_length: ``S``.
        block_size: ``B``.
    """

    def may_attend(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // block_size
        in_context = (key < context_length) & (key < anchors[batch, block])
        in_block = (key >= context_length) & ((key - context_length) // block_size == block)
        return keep[batch, block] & (in_context | in_block)

    return may_attend


def dense_mask(anchors: Tensor, keep: Tensor, context_length: int, block_size: int) -> Tensor:
    """Return the rule written out: bool ``[batch, 1, N * B, S + N * B]``; arguments as in `mask_rule`."""
    batch, blocks = anchors.shape
    rows = blocks * block_size
    device = anchors.device
    return mask_rule(anchors, keep, context_length, block_size)(
        torch.arange(batch, device=device).view(-1, 1, 1, 1),
        torch.zeros((), dtype=torch.long, device=device),
        torch.arange(rows, device=device).view(1, 1, -1, 1),
        torch.arange(context_length + rows, device=device).view(1, 1, 1, -1),
    )


# Uncompiled it writes the dense mask, and several times: 6 ms at the paper's sizes on an H200, 0.4 ms compiled.
_create_block_mask = thread_safe_compile(create_block_mask, backend=BACKEND, dynamic=False)


def build_mask(anchors: Tensor, keep: Tensor, context_length: int, block_size: int) -> Mask:
    """Return the mask in the form that `attend` wants on the device of ``anchors``; arguments as in `mask_rule`.

    On a GPU that is a block mask, which skips what nobody sees. flex_attention has no backward on CPU (torch 2.13.0 raises
    NotImplementedError), so the CPU gets the dense mask.
    """
    if anchors.device.type != "cuda":
        return dense_mask(anchors, keep, context_length, block_size)
    batch, blocks = anchors.shape
    rows = blocks * block_size
    rule = mask_rule(anchors, keep, context_length, block_size)
    return _create_block_mask(rule, batch, None, rows, context_length + rows, device=anchors.device)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask | None) -> Tensor:
    """Scaled dot-product attention (Vaswani et al. 2017, equation 1) with grouped key/value heads.

    Args:
        query: ``[batch, heads, rows, head_dim]``.
        key, value: ``[batch, kv_heads, keys, head_dim]``, with ``heads`` a multiple of ``kv_heads``.
        mask: from `build_mask`; None when everything is visible, as in drafting (one block, and all context is before it).

    Returns:
        ``[batch, heads, rows, head_dim]``; rows that see nothing are zero.
    """
    # Autocast leaves rotated queries and keys in float32 beside values in the lower precision.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if isinstance(mask, BlockMask):
        output = flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
        assert isinstance(output, Tensor)
        return output
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if mask is None:
        return nn.functional.scaled_dot_product_attention(query, key, value)
    # A softmax over nothing is not a number, in the backward too: such rows look at everything, and the result is dropped.
    blind = ~mask.any(dim=-1, keepdim=True)
    output = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask | blind)
    return output.masked_fill(blind, 0.0)
