"""Attention of the drafter: one rule for who may see what, as a dense mask or as a flex block mask.

Keys are the context's ``S`` tokens followed by the ``N`` blocks of ``B`` rows; queries are the blocks' rows only
(paper, Figure 4 and section A.3). Layers are of two kinds, named as in the configurations of published checkpoints: a full
layer is the paper's; a sliding layer sees a window of the context and is causal inside the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from backend import BACKEND
from safecompile import thread_safe_compile

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
TILE: Final = 128  # rows and columns of a tile of flex attention's masks

Mask: TypeAlias = Tensor | BlockMask
"""A dense bool mask ``[batch, 1, N * B, S + N * B]`` (True: visible), or the same as a flex block mask."""

Masks: TypeAlias = Mapping[str, Mask | None]
"""The mask of each kind of layer there is, by its name; None where everything is visible."""

MaskRule: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Layout(NamedTuple):
    """Where the blocks of a batch are.

    Attributes:
        anchors: int64 ``[batch, N]``, positions in the context.
        keep: bool ``[batch, N]``; rows of a block that is not kept (padding) see nothing.
        context_length: ``S``.
        block_size: ``B``.
        documents: int64 ``[batch, S]``, the number of the document that each token of a packed sequence belongs to: a block
            sees the context of its anchor's document only. None if a sequence is one document.
    """

    anchors: Tensor
    keep: Tensor
    context_length: int
    block_size: int
    documents: Tensor | None = None

    @property
    def rows(self) -> int:
        """Rows of all blocks of a sequence, ``N * B``."""
        return self.anchors.shape[1] * self.block_size


def mask_rule(layout: Layout, window: int | None = None) -> MaskRule:
    """Return the rule ``(batch, head, query, key) -> may attend`` on index tensors of any broadcastable shapes.

    A row of the block at anchor ``a`` sees the context *strictly* before ``a`` and every row of its own block, in both
    directions. The anchor's own context entry stays hidden: when drafting, the anchor is the token the target has just
    chosen and not yet read, so no feature of it exists (paper, Figure 4).

    With a window of ``W``, slot ``k`` sees only what lies less than ``W`` tokens back, itself included: the context from
    ``a + k - (W - 1)``, and the slots of its block from ``k - (W - 1)`` *to itself*. The paper has no windows; this is how
    published drafters with sliding layers were trained (SpecForge, ``create_dflash_block_mask``) and how vLLM
    (``_resolve_layer_attention``) and SGLang (``_get_dflash_layer_attention_params``) run them: as causal layers.

    Args:
        layout: where the blocks are.
        window: ``W`` of a sliding layer; None for a full layer.
    """
    anchors, keep, context_length, block_size, documents = layout

    # Only truth values are as large as the mask: create_block_mask makes every intermediate whole, and with 512 blocks of 16 rows
    # over 3,072 tokens one of whole numbers would take 0.7 GB.
    def may_attend(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // block_size
        anchor, row = anchors[batch, block], key - context_length
        in_context = (key < context_length) & (key < anchor)
        in_block = (row >= 0) & (row // block_size == block)
        if documents is not None:
            in_context = in_context & (documents[batch, key.clamp(max=context_length - 1)] == documents[batch, anchor])
        if window is not None:
            in_context = in_context & (key > anchor + query % block_size - window)
            in_block = in_block & (row <= query) & (row > query - window)
        return keep[batch, block] & (in_context | in_block)

    return may_attend


def dense_mask(layout: Layout, window: int | None = None) -> Tensor:
    """Return the rule written out: bool ``[batch, 1, N * B, S + N * B]``; arguments as in `mask_rule`."""
    device = layout.anchors.device
    return mask_rule(layout, window)(
        torch.arange(len(layout.anchors), device=device).view(-1, 1, 1, 1),
        torch.zeros((), dtype=torch.long, device=device),
        torch.arange(layout.rows, device=device).view(1, 1, -1, 1),
        torch.arange(layout.context_length + layout.rows, device=device).view(1, 1, 1, -1),
    )


def block_mask(layout: Layout, window: int | None = None) -> BlockMask:
    """Return the rule as a flex block mask, which skips what nobody sees; arguments as in `mask_rule`.

    The same as torch's ``create_block_mask``, in one graph: that function breaks into ten on torch 2.11.
    """
    tiles = _compiled_tiles if layout.anchors.device.type == "cuda" else _tiles
    partial, columns, full, full_columns, by_key, rows, full_by_key, full_rows = tiles(layout, window)
    return BlockMask(
        seq_lengths=(layout.rows, layout.context_length + layout.rows),
        kv_num_blocks=partial,
        kv_indices=columns,
        full_kv_num_blocks=full,
        full_kv_indices=full_columns,
        q_num_blocks=by_key,
        q_indices=rows,
        full_q_num_blocks=full_by_key,
        full_q_indices=full_rows,
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=mask_rule(layout, window),
    )


def _tiles(layout: Layout, window: int | None) -> tuple[Tensor, ...]:
    """Return the tiles of which something, but not all, is visible and those of which all is, listed by query and then by key."""
    mask = dense_mask(layout, window)
    padded = nn.functional.pad(mask, (0, -mask.shape[3] % TILE, 0, -mask.shape[2] % TILE))
    visible = padded.unflatten(3, (-1, TILE)).unflatten(2, (-1, TILE)).sum((3, 5))
    full = visible == TILE * TILE
    partial = (visible > 0) & ~full
    return (*_listed(partial), *_listed(full), *_listed(partial.mT), *_listed(full.mT))


# Uncompiled it writes the dense mask, and several times, for which torch's own took 6 ms at the paper's sizes on an H200.
_compiled_tiles = thread_safe_compile(_tiles, backend=BACKEND, dynamic=False)


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many tiles each row has, int32 ``[batch, 1, rows]``, and a row's columns with these first, ``[batch, 1, rows, columns]``."""
    order = tiles.int().argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32), order.to(torch.int32, memory_format=torch.contiguous_format)


def build_masks(layer_types: Iterable[str], sliding_window: int | None, layout: Layout, *, dense: bool) -> Masks:
    """Return one mask for each kind of layer there is.

    Args:
        layer_types: `FULL` or `SLIDING` for each layer; all of a kind share a mask.
        sliding_window: ``W`` of the sliding layers.
        layout: where the blocks are.
        dense: write them out, instead of as block masks for flex_attention, which has no backward on CPU (torch 2.13.0 raises
            NotImplementedError).
    """
    build = dense_mask if dense else block_mask
    return {kind: build(layout, sliding_window if kind == SLIDING else None) for kind in sorted(set(layer_types))}


def drafting_mask(kept: int, block_size: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return the rule for one block that is drafted after ``kept`` entries of context, the last of them just before its anchor.

    The rule knows distances only, so that the entries may be counted from the first one kept.

    Returns:
        bool ``[1, 1, B, kept + B]``, or None where the rule shows everything, as in a full layer.
    """
    if window is None:
        return None
    anchor = torch.full((1, 1), kept, device=device)
    return dense_mask(Layout(anchor, torch.ones_like(anchor, dtype=torch.bool), kept, block_size), window)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask | None) -> Tensor:
    """Scaled dot-product attention (Vaswani et al. 2017, equation 1) with grouped key/value heads.

    Args:
        query: ``[batch, heads, rows, head_dim]``.
        key, value: ``[batch, kv_heads, keys, head_dim]``, with ``heads`` a multiple of ``kv_heads``.
        mask: of this kind of layer, from `build_masks` or `drafting_mask`; None when everything is visible.

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
