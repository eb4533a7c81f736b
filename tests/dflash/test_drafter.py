"""The drafter sees what it may and nothing else, at the right positions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import blocks
from attention import build_mask
from drafter import Drafter, DrafterShape, Layer, rotate, rotation

SHAPE = DrafterShape(
    hidden_size=32,
    intermediate_size=48,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    taps=3,
    rope_theta=10000.0,
    rms_norm_eps=1e-6,
)
CONTEXT, BLOCK = 24, 4
ANCHORS = torch.tensor([[6, 8, 17]])
KEEP = torch.ones_like(ANCHORS, dtype=torch.bool)


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    drafter = Drafter(SHAPE)
    drafter.initialize(0.3, torch.Generator().manual_seed(0))
    return drafter


@pytest.fixture
def features() -> Tensor:
    return torch.randn(1, CONTEXT, 3 * 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def embeddings() -> Tensor:
    return torch.randn(1, ANCHORS.shape[1] * BLOCK, 32, generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def run(drafter: Drafter, features: Tensor, embeddings: Tensor) -> Tensor:
    """Return the outputs, ``[block, slot, D]``."""
    output = drafter(
        features,
        embeddings,
        torch.arange(CONTEXT).unsqueeze(0),
        blocks.positions(ANCHORS, BLOCK),
        build_mask(ANCHORS, KEEP, CONTEXT, BLOCK),
    )
    assert isinstance(output, Tensor)
    return output.unflatten(1, (-1, BLOCK))[0]


@pytest.mark.parametrize("block", range(3))
def test_features_at_and_after_the_anchor_are_invisible(
    drafter: Drafter, features: Tensor, embeddings: Tensor, block: int
) -> None:
    before = run(drafter, features, embeddings)
    anchor = int(ANCHORS[0, block])
    features[:, anchor:] += 1.0
    assert torch.equal(run(drafter, features, embeddings)[block], before[block])


@pytest.mark.parametrize("block", range(3))
def test_the_feature_before_the_anchor_is_visible_to_every_slot(
    drafter: Drafter, features: Tensor, embeddings: Tensor, block: int
) -> None:
    before = run(drafter, features, embeddings)
    features[:, int(ANCHORS[0, block]) - 1] += 1.0
    after = run(drafter, features, embeddings)
    assert (after[block] != before[block]).any(dim=-1).all()


def test_blocks_do_not_see_each_other_even_when_they_overlap(
    drafter: Drafter, features: Tensor, embeddings: Tensor
) -> None:
    before = run(drafter, features, embeddings)
    embeddings[:, BLOCK : 2 * BLOCK] += 1.0
    after = run(drafter, features, embeddings)
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[2], before[2])
    assert (after[1] != before[1]).any(dim=-1).all()


def test_a_slot_sees_the_later_slots_of_its_block(drafter: Drafter, features: Tensor, embeddings: Tensor) -> None:
    before = run(drafter, features, embeddings)
    embeddings[:, BLOCK - 1] += 1.0
    assert (run(drafter, features, embeddings)[0] != before[0]).any(dim=-1).all()


@pytest.mark.parametrize("block", range(3))
def test_drafting_from_kept_context_gives_what_training_gives(
    drafter: Drafter, features: Tensor, embeddings: Tensor, block: int
) -> None:
    """The context arrives in two pieces at absolute positions, up to the anchor and without a mask."""
    trained = run(drafter, features, embeddings)
    anchor = int(ANCHORS[0, block])
    with torch.no_grad():
        pieces = [drafter.context(features[:, a:b], torch.arange(a, b).unsqueeze(0)) for a, b in ((0, 3), (3, anchor))]
        context = [
            (torch.cat((first[0], second[0]), 2), torch.cat((first[1], second[1]), 2))
            for first, second in zip(*pieces, strict=True)
        ]
        rows = embeddings[:, block * BLOCK : (block + 1) * BLOCK]
        drafted = drafter.blocks(rows, torch.arange(anchor, anchor + BLOCK).unsqueeze(0), context, None)
    torch.testing.assert_close(drafted[0], trained[block])


def test_a_block_at_another_distance_from_its_context_differs(
    drafter: Drafter, features: Tensor, embeddings: Tensor
) -> None:
    with torch.no_grad():
        context = drafter.context(features[:, :6], torch.arange(6).unsqueeze(0))
        near, far = (
            drafter.blocks(embeddings[:, :BLOCK], torch.arange(start, start + BLOCK).unsqueeze(0), context, None)
            for start in (6, 7)
        )
    assert not torch.allclose(near, far)


def test_the_context_passes_no_input_norm(drafter: Drafter, features: Tensor) -> None:
    at = torch.arange(CONTEXT).unsqueeze(0)
    layer = drafter.layers[0]
    assert isinstance(layer, Layer)
    with torch.no_grad():
        before = drafter.context(features, at)[0]
        layer.input_layernorm.weight.mul_(2)
        after = drafter.context(features, at)[0]
        layer.input_layernorm.weight.div_(2)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


def test_parameters_have_the_published_names(drafter: Drafter) -> None:
    per_layer = [
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        *(f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")),
    ]
    names = {"fc.weight", "hidden_norm.weight", "norm.weight"} | {
        f"layers.{i}.{n}" for i in range(2) for n in per_layer
    }
    assert set(drafter.state_dict()) == names
    assert drafter.fc.weight.shape == (32, 3 * 32)


def test_rotation_is_the_one_of_qwen3() -> None:
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3", reason="compares with transformers")
    config = pytest.importorskip("transformers").Qwen3Config(head_dim=8, hidden_size=32, num_attention_heads=4)
    at = torch.tensor([[0, 3, 100, 1000]])
    rows = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(0))
    cos, sin = qwen3.Qwen3RotaryEmbedding(config)(rows, at)
    expected, _ = qwen3.apply_rotary_pos_emb(rows, rows, cos, sin)
    torch.testing.assert_close(rotate(rows, rotation(at, 8, config.rope_parameters["rope_theta"])), expected)
