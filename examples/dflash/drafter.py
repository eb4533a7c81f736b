"""The drafter: a small Qwen3-style decoder whose every layer also attends to the target's features.

It has no embedding and no output head of its own: blocks come in as the target's embeddings, and the target's head turns the
output into logits (paper, section 4.2). Parameter names are those of published DFlash checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

import data
from attention import FULL, SLIDING, Mask, Masks, attend, drafting_mask
from backend import BACKEND
from config import Config, ConfigError
from safecompile import thread_safe_compile
from target import TargetShape

KeysValues: TypeAlias = tuple[Tensor, Tensor]
"""Keys and values of one layer, each ``[batch, kv_heads, rows, head_dim]``."""

Rotation: TypeAlias = tuple[Tensor, Tensor]
"""Cosines and sines of the rotary embedding, each ``[batch or 1, 1, rows, head_dim]``."""


@dataclass(frozen=True)
class DrafterShape:
    """Sizes of a drafter; those shared with its target must be equal to the target's.

    Attributes:
        hidden_size: ``D``, the target's width.
        intermediate_size: width of the feed-forward part.
        layers: number of draft layers.
        heads, kv_heads, head_dim: attention geometry, free of the target's.
        taps: number of target layers that features come from.
        rope_theta: base of the rotary embedding, the target's.
        rms_norm_eps: the target's.
        layer_types: ``full_attention`` or ``sliding_attention`` for each layer; empty for full layers only.
        sliding_window: ``W``, the tokens that a sliding layer looks back, itself included; None without such layers.

    Raises:
        ConfigError: if the sizes do not go together.
    """

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    taps: int
    rope_theta: float
    rms_norm_eps: float
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", (FULL,) * self.layers)
        if len(self.layer_types) != self.layers or not {FULL, SLIDING}.issuperset(self.layer_types):
            raise ConfigError(
                f"layer_types are {', '.join(self.layer_types)}: name {FULL} or {SLIDING} for each of {self.layers} draft layers"
            )
        if SLIDING in self.layer_types and (self.sliding_window is None or self.sliding_window < 1):
            raise ConfigError(f"sliding_window is {self.sliding_window}, sliding layers need at least 1")
        if SLIDING not in self.layer_types and self.sliding_window is not None:
            raise ConfigError(f"sliding_window is {self.sliding_window}, but no layer in layer_types is {SLIDING}")
        if self.heads < 1 or self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ConfigError(
                f"a drafter of {self.heads} heads and {self.kv_heads} key/value heads: the first must be a multiple of the second"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ConfigError(f"a drafter's head_dim is {self.head_dim}, the rotary embedding needs an even number")
        if self.intermediate_size < 1:
            raise ConfigError(f"a drafter's intermediate_size is {self.intermediate_size}, it must be at least 1")

    def window(self, layer: int) -> int | None:
        """Return how far a layer looks back; None for a full layer, which sees everything."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None


def drafter_shape(config: Config, target: TargetShape, taps: int) -> DrafterShape:
    """Return the drafter for a target: of its width, with fewer layers, and with its heads unless the configuration names others.

    Raises:
        ConfigError: if the sizes do not go together.
    """
    layer_types = tuple(config.layer_types or ())
    return DrafterShape(
        hidden_size=target.hidden_size,
        intermediate_size=_own(config.draft_intermediate_size, target.intermediate_size),
        layers=config.layers,
        heads=_own(config.draft_heads, target.heads),
        kv_heads=_own(config.draft_kv_heads, target.kv_heads),
        head_dim=_own(config.draft_head_dim, target.head_dim),
        taps=taps,
        rope_theta=target.rope_theta,
        rms_norm_eps=target.rms_norm_eps,
        layer_types=layer_types,
        sliding_window=config.sliding_window if SLIDING in layer_types else None,
    )


def new_drafter(config: Config, target: TargetShape, taps: int, device: torch.device) -> Drafter:
    """Return an untrained drafter; its weights follow from the seed alone."""
    drafter = Drafter(drafter_shape(config, target, taps))
    drafter.initialize(target.initializer_range, data.generator(config.seed, "drafter"))
    return drafter.to(device)


def rotation(positions: Tensor, head_dim: int, theta: float) -> Rotation:
    """Return the rotary embedding of absolute positions, int64 ``[batch or 1, rows]``, in the half-split layout of Qwen3.

    Angles are ``position * theta ** (-2 i / head_dim)`` (Su et al. 2021, "RoFormer", equation 15).
    """
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angles = (positions.float().unsqueeze(-1) * frequencies).repeat(1, 1, 2).unsqueeze(1)
    return angles.cos(), angles.sin()


def rotate(rows: Tensor, by: Rotation) -> Tensor:
    """Turn ``[batch, heads, rows, head_dim]`` by their positions (RoFormer, equation 34, with halves instead of pairs)."""
    cos, sin = by
    first, second = rows.chunk(2, dim=-1)
    return rows * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Attention of block rows over ``[context | blocks]``: key/value injection (paper, section A.3).

    Keys and values of the context come from the fused features through the *same* projections as the blocks'. Context rows
    make no queries and pass no output projection and no feed-forward part.
    """

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)

    def keys_values(self, rows: Tensor, by: Rotation) -> KeysValues:
        """Project ``[batch, rows, D]``, context or block, to keys (normed per head, then rotated) and values (paper, section A.3)."""
        key = self.k_norm(self._heads(self.k_proj(rows)))
        return rotate(key, by), self._heads(self.v_proj(rows))

    def forward(self, rows: Tensor, context: KeysValues, by: Rotation, mask: Mask | None) -> Tensor:
        """Attend from block rows ``[batch, rows, D]`` to ``[context; block]``; return the same shape (paper, section A.3)."""
        query = rotate(self.q_norm(self._heads(self.q_proj(rows))), by)
        key, value = self.keys_values(rows, by)
        key, value = torch.cat((context[0], key), dim=2), torch.cat((context[1], value), dim=2)
        return self.o_proj(attend(query, key, value, mask).transpose(1, 2).flatten(2))

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class FeedForward(nn.Module):
    """The gated feed-forward part of a Qwen3 layer, ``down(silu(gate x) * up x)`` (Shazeer 2020, equation 6, "SwiGLU")."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Map ``[batch, rows, D]`` to the same shape."""
        return self.down_proj(nn.functional.silu(self.gate_proj(rows)) * self.up_proj(rows))


class Layer(nn.Module):
    """One draft layer. Its input norm is for block rows only: the context has been normed once, after the fusion (paper, A.3)."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, rows: Tensor, context: KeysValues, by: Rotation, mask: Mask | None) -> Tensor:
        """Map block rows ``[batch, rows, D]`` to the same shape."""
        rows = rows + self.self_attn(self.input_layernorm(rows), context, by, mask)
        return rows + self.mlp(self.post_attention_layernorm(rows))


class Drafter(nn.Module):
    """The trainable part of a DFlash drafter.

    Training calls the module: all blocks of a batch at once, compiled. Drafting calls `context` for the new features only,
    `keep`s the result, and calls `draft` for one block; nothing there is compiled, as its shapes change every cycle.
    """

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.taps * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def initialize(self, std: float, rng: torch.Generator) -> None:
        """Draw every weight matrix from a normal distribution with ``rng`` alone; norms start at 1."""
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=std, generator=rng)

    def context(self, features: Tensor, positions: Tensor) -> list[KeysValues]:
        """Return each layer's keys and values of the context.

        The features are fused once, ``H = RMSNorm(W_c [h_1; ...; h_n])``, for all layers (paper, section A.3).

        Args:
            features: ``[batch, S, taps * D]``, the outputs of the tapped target layers side by side.
            positions: int64 ``[batch or 1, S]``, absolute.
        """
        fused = self.hidden_norm(self.fc(features))
        by = rotation(positions, self.shape.head_dim, self.shape.rope_theta)
        return [layer.self_attn.keys_values(fused, by) for layer in self._layers()]

    def blocks(self, embeddings: Tensor, positions: Tensor, context: list[KeysValues], masks: Masks) -> Tensor:
        """Return the normed output of block rows, ``[batch, rows, D]``, ready for the target's head.

        Args:
            embeddings: ``[batch, rows, D]``, the target's embeddings of the blocks' tokens.
            positions: int64 ``[batch, rows]``, absolute: ``anchor + k``.
            context: from `context`.
            masks: from `attention.build_masks`.
        """
        by = rotation(positions, self.shape.head_dim, self.shape.rope_theta)
        rows = embeddings
        for layer, kind, keys_values in zip(self._layers(), self.shape.layer_types, context, strict=True):
            rows = layer(rows, keys_values, by, masks[kind])
        normed: Tensor = self.norm(rows)
        return normed

    def keep(self, old: list[KeysValues], new: list[KeysValues]) -> list[KeysValues]:
        """Return kept context with the new entries after it, without what the window of a layer hides from all later blocks.

        Args:
            old: from the `keep` before, or empty.
            new: from `context`.
        """
        kept = []
        for layer, entries in enumerate(new):
            joined = [torch.cat(pair, dim=2) for pair in zip(old[layer], entries, strict=True)] if old else entries
            window = self.shape.window(layer)
            # Slot 0 of a block looks back furthest, and sees itself.
            first = 0 if window is None else max(0, joined[0].shape[2] - (window - 1))
            kept.append((joined[0][:, :, first:], joined[1][:, :, first:]))
        return kept

    def draft(self, embeddings: Tensor, anchor: int, context: list[KeysValues]) -> Tensor:
        """Return the normed output of one block, ``[1, B, D]``: what training gives for the block at that anchor.

        Args:
            embeddings: ``[1, B, D]``, of the anchor's token and of mask tokens.
            anchor: its absolute position.
            context: from `keep`; the last entry is that of the token before the anchor.
        """
        size, device = embeddings.shape[1], embeddings.device
        masks = {
            kind: drafting_mask(keys.shape[2], size, self.shape.window(layer), device)
            for layer, (kind, (keys, _)) in enumerate(zip(self.shape.layer_types, context, strict=True))
        }
        return self.blocks(embeddings, torch.arange(anchor, anchor + size, device=device).unsqueeze(0), context, masks)

    @thread_safe_compile(backend=BACKEND, dynamic=False)
    def forward(
        self, features: Tensor, embeddings: Tensor, context_positions: Tensor, block_positions: Tensor, masks: Masks
    ) -> Tensor:
        """Return the normed output of all blocks, ``[batch, N * B, D]``; arguments as in `context` and `blocks`."""
        return self.blocks(embeddings, block_positions, self.context(features, context_positions), masks)

    def _layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]


def _own(named: int | None, targets: int) -> int:
    return targets if named is None else named
