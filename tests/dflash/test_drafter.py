"""The drafter sees what it may and nothing else, at the right positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import blocks
from attention import FULL, SLIDING, Layout, build_masks
from config import ConfigError
from drafter import Drafter, DrafterShape, KeysValues, Layer, rotate, rotation
from safecompile import statistics

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
CONTEXT, BLOCK, WINDOW = 24, 4, 5
ANCHORS = torch.tensor([[6, 8, 17]])
KEEP = torch.ones_like(ANCHORS, dtype=torch.bool)


def new(*layer_types: str) -> Drafter:
    window = WINDOW if SLIDING in layer_types else None
    drafter = Drafter(replace(SHAPE, layers=len(layer_types), layer_types=layer_types, sliding_window=window))
    drafter.initialize(0.3, torch.Generator().manual_seed(0))
    return drafter


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    return new(FULL, FULL)


@pytest.fixture(scope="module")
def sliding() -> Drafter:
    return new(SLIDING, SLIDING)


@pytest.fixture(scope="module", params=[(FULL, FULL), (SLIDING, SLIDING), (SLIDING, FULL)], ids="-".join)
def any_drafter(request: pytest.FixtureRequest) -> Drafter:
    return new(*request.param)


@pytest.fixture
def features() -> Tensor:
    return torch.randn(1, CONTEXT, 3 * 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def embeddings() -> Tensor:
    return torch.randn(1, ANCHORS.shape[1] * BLOCK, 32, generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def run(drafter: Drafter, features: Tensor, embeddings: Tensor, documents: Tensor | None = None) -> Tensor:
    """Return the outputs, ``[block, slot, D]``."""
    shape = drafter.shape
    output = drafter(
        features,
        embeddings,
        torch.arange(CONTEXT).unsqueeze(0),
        blocks.positions(ANCHORS, BLOCK),
        build_masks(
            shape.layer_types, shape.sliding_window, Layout(ANCHORS, KEEP, CONTEXT, BLOCK, documents), dense=True
        ),
    )
    assert isinstance(output, Tensor)
    return output.unflatten(1, (-1, BLOCK))[0]


def changed(after: Tensor, before: Tensor) -> list[bool]:
    """Tell for each slot ``[slot, D]`` whether any bit of it changed."""
    return (after != before).any(dim=-1).tolist()


@pytest.mark.parametrize("block", range(3))
def test_features_at_and_after_the_anchor_are_invisible(
    any_drafter: Drafter, features: Tensor, embeddings: Tensor, block: int
) -> None:
    before = run(any_drafter, features, embeddings)
    anchor = int(ANCHORS[0, block])
    features[:, anchor:] += 1.0
    assert torch.equal(run(any_drafter, features, embeddings)[block], before[block])


@pytest.mark.parametrize("block", range(3))
def test_the_feature_before_the_anchor_is_visible_to_every_slot(
    any_drafter: Drafter, features: Tensor, embeddings: Tensor, block: int
) -> None:
    before = run(any_drafter, features, embeddings)
    features[:, int(ANCHORS[0, block]) - 1] += 1.0
    assert all(changed(run(any_drafter, features, embeddings)[block], before[block]))


def test_blocks_do_not_see_each_other_even_when_they_overlap(
    any_drafter: Drafter, features: Tensor, embeddings: Tensor
) -> None:
    before = run(any_drafter, features, embeddings)
    embeddings[:, BLOCK : 2 * BLOCK] += 1.0
    after = run(any_drafter, features, embeddings)
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[2], before[2])
    assert all(changed(after[1], before[1]))


@pytest.mark.parametrize("block", range(3))
def test_features_before_the_window_are_invisible(
    sliding: Drafter, features: Tensor, embeddings: Tensor, block: int
) -> None:
    """However many sliding layers there are: the context passes through none of them."""
    before = run(sliding, features, embeddings)
    features[:, : int(ANCHORS[0, block]) - (WINDOW - 1)] += 1.0
    assert torch.equal(run(sliding, features, embeddings)[block], before[block])


@pytest.mark.parametrize("back", range(1, WINDOW + 1))
def test_one_sliding_layer_looks_back_further_from_early_slots_than_from_late_ones(
    features: Tensor, embeddings: Tensor, back: int
) -> None:
    drafter = new(SLIDING)
    before = run(drafter, features, embeddings)
    features[:, int(ANCHORS[0, 2]) - back] += 1.0
    after = run(drafter, features, embeddings)
    assert changed(after[2], before[2]) == [slot + back < WINDOW for slot in range(BLOCK)]


@pytest.mark.parametrize("slot", range(BLOCK))
def test_in_sliding_layers_a_slot_sees_itself_and_earlier_slots_only(
    sliding: Drafter, features: Tensor, embeddings: Tensor, slot: int
) -> None:
    before = run(sliding, features, embeddings)
    embeddings[:, BLOCK + slot] += 1.0
    assert changed(run(sliding, features, embeddings)[1], before[1]) == [other >= slot for other in range(BLOCK)]


def test_a_block_of_a_packed_sequence_sees_its_own_document_only(
    any_drafter: Drafter, features: Tensor, embeddings: Tensor
) -> None:
    """The second block's document begins one token before its anchor."""
    documents = (torch.arange(CONTEXT) >= int(ANCHORS[0, 1]) - 1).long().unsqueeze(0)
    before = run(any_drafter, features, embeddings, documents)
    features[:, : int(ANCHORS[0, 1]) - 1] += 1.0
    after = run(any_drafter, features, embeddings, documents)
    assert torch.equal(after[1:], before[1:])
    assert all(changed(after[0], before[0]))
    assert any(changed(run(any_drafter, features, embeddings)[1], before[1]))


def test_a_slot_sees_the_later_slots_of_its_block(drafter: Drafter, features: Tensor, embeddings: Tensor) -> None:
    before = run(drafter, features, embeddings)
    embeddings[:, BLOCK - 1] += 1.0
    assert (run(drafter, features, embeddings)[0] != before[0]).any(dim=-1).all()


@pytest.mark.parametrize("block", range(3))
def test_drafting_from_kept_context_gives_what_training_gives(
    any_drafter: Drafter, features: Tensor, embeddings: Tensor, block: int
) -> None:
    """The context arrives in two pieces at absolute positions, up to the anchor; a sliding layer keeps its window of it."""
    trained = run(any_drafter, features, embeddings)
    anchor = int(ANCHORS[0, block])
    context: list[KeysValues] = []
    with torch.no_grad():
        for start, end in ((0, 5), (5, anchor)):
            new = any_drafter.context(features[:, start:end], torch.arange(start, end).unsqueeze(0))
            context = any_drafter.keep(context, new)
        drafted = any_drafter.draft(embeddings[:, block * BLOCK : (block + 1) * BLOCK], anchor, context)
    torch.testing.assert_close(drafted[0], trained[block])
    for kind, (keys, values) in zip(any_drafter.shape.layer_types, context, strict=True):
        assert keys.shape[2] == values.shape[2] == (WINDOW - 1 if kind == SLIDING else anchor)


def test_new_masks_at_every_step_compile_nothing_new(features: Tensor, embeddings: Tensor) -> None:
    """Dense ones, and block ones, which hold a rule of their own each."""
    torch.compiler.reset()
    drafter = new(SLIDING, FULL, SLIDING)
    outputs: dict[str, list[Tensor]] = {}
    for form in ("dense", "block"):
        before = statistics().compiled
        for shift in range(3):
            anchors = ANCHORS + shift
            layout = Layout(anchors, KEEP, CONTEXT, BLOCK)
            masks = build_masks(drafter.shape.layer_types, WINDOW, layout, dense=form == "dense")
            at = torch.arange(CONTEXT).unsqueeze(0)
            with torch.no_grad():
                output = drafter(features, embeddings, at, blocks.positions(anchors, BLOCK), masks)
            outputs.setdefault(form, []).append(output)
        assert statistics().compiled - before == 1
    for dense, block in zip(outputs["dense"], outputs["block"], strict=True):
        torch.testing.assert_close(dense, block)


@pytest.mark.gpu  # flex_attention has a backward only there
def test_a_gpu_gives_what_the_cpu_gives(any_drafter: Drafter, features: Tensor, embeddings: Tensor) -> None:
    """Outputs and all gradients, of a drafter with heads as wide as flex_attention's kernels ask for."""
    shape = replace(any_drafter.shape, head_dim=16)
    results = []
    for device in ("cpu", "cuda"):
        drafter = Drafter(shape)
        drafter.initialize(0.3, torch.Generator().manual_seed(0))
        drafter.to(device)
        anchors, keep = ANCHORS.to(device), KEEP.to(device)
        output = drafter(
            features.to(device),
            embeddings.to(device),
            torch.arange(CONTEXT, device=device).unsqueeze(0),
            blocks.positions(anchors, BLOCK),
            build_masks(
                shape.layer_types,
                shape.sliding_window,
                Layout(anchors, keep, CONTEXT, BLOCK),
                dense=device == "cpu",
            ),
        )
        output.square().mean().backward()
        results.append([output.detach().cpu(), *(p.grad.cpu() for p in drafter.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) == 1 + len(list(Drafter(shape).parameters()))
    for on_cpu, on_gpu in zip(*results, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=2e-2, atol=2e-2)  # TF32 products in flex_attention's kernels


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": (FULL,)}, "layer_types"),
        ({"layer_types": (FULL, "causal")}, "layer_types"),
        ({"layer_types": (FULL, SLIDING)}, "sliding_window"),
        ({"layer_types": (FULL, SLIDING), "sliding_window": 0}, "sliding_window"),
        ({"sliding_window": 8}, "sliding_window"),
        ({"kv_heads": 3}, "multiple"),
        ({"head_dim": 7}, "even"),
        ({"intermediate_size": 0}, "intermediate_size"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SHAPE, **changes)


def test_a_block_at_another_distance_from_its_context_differs(
    drafter: Drafter, features: Tensor, embeddings: Tensor
) -> None:
    with torch.no_grad():
        context = drafter.context(features[:, :6], torch.arange(6).unsqueeze(0))
        near, far = (drafter.draft(embeddings[:, :BLOCK], start, context) for start in (6, 7))
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
