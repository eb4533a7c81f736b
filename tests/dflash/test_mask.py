"""Who may attend to whom, against a definition written out in loops, in both forms of the mask."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import attention
from attention import FULL, SLIDING, Layout, attend, block_mask, build_masks, dense_mask, drafting_mask, mask_rule
from safecompile import statistics

CONTEXT, BLOCK = 12, 4
ANCHORS = torch.tensor([[0, 3, 5, 11], [2, 4, 7, 0]])
KEEP = torch.tensor([[True, True, True, True], [True, True, True, False]])
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 8, [5] * 3 + [2] * 2 + [7] * 7])
LAYOUT = Layout(ANCHORS, KEEP, CONTEXT, BLOCK)

every_rule = pytest.mark.parametrize(
    ("window", "documents"),
    list(itertools.product([None, 1, 3, 5, 100], [None, DOCUMENTS])),
    ids=["alone", "packed"] * 5,
)


def brute_force(window: int | None, documents: Tensor | None) -> Tensor:
    batch, blocks = ANCHORS.shape
    mask = torch.zeros(batch, 1, blocks * BLOCK, CONTEXT + blocks * BLOCK, dtype=torch.bool)
    for b, n, slot in itertools.product(range(batch), range(blocks), range(BLOCK)):
        anchor = int(ANCHORS[b, n])
        row = mask[b, 0, n * BLOCK + slot]
        if not KEEP[b, n]:
            continue
        for position in range(anchor):
            near = window is None or position >= anchor + slot - (window - 1)
            row[position] = near and (documents is None or bool(documents[b, position] == documents[b, anchor]))
        for other in range(BLOCK):
            row[CONTEXT + n * BLOCK + other] = window is None or slot - (window - 1) <= other <= slot
    return mask


def qkv(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    rows = ANCHORS.shape[1] * BLOCK
    query = torch.randn(2, 4, rows, 8, generator=rng)
    key, value = (torch.randn(2, 2, CONTEXT + rows, 8, generator=rng) for _ in range(2))
    return query, key, value


@every_rule
def test_the_dense_mask_is_the_definition(window: int | None, documents: Tensor | None) -> None:
    mask = dense_mask(LAYOUT._replace(documents=documents), window)
    assert torch.equal(mask, brute_force(window, documents))


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("documents", [None, torch.arange(300).view(1, -1) // 70], ids=["alone", "packed"])
def test_the_block_mask_is_the_dense_one(window: int | None, documents: Tensor | None) -> None:
    """In every tile that it leaves; and a tile that it leaves out, or calls full, is empty or full. There are 3 by 6 tiles."""
    anchors = torch.randperm(300, generator=torch.Generator().manual_seed(0))[:24].sort().values.view(1, -1)
    keep = torch.arange(24).view(1, -1) < 20
    layout = Layout(anchors, keep, 300, 16, documents)
    tiled, dense = block_mask(layout, window), dense_mask(layout, window)[0, 0]
    query, key = torch.meshgrid(torch.arange(24 * 16), torch.arange(300 + 24 * 16), indexing="ij")
    zero = torch.zeros((), dtype=torch.long)
    assert torch.equal(tiled.mask_mod(zero, zero, query, key), dense)
    padded = torch.nn.functional.pad(dense, (0, -dense.shape[1] % 128, 0, -dense.shape[0] % 128))
    counts = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).sum(dim=(1, 3))
    assert torch.equal(tiled.to_dense()[0, 0].bool(), counts > 0)
    assert (counts == 0).any()
    assert tiled.full_kv_num_blocks is not None
    assert int(tiled.full_kv_num_blocks.sum()) == int((counts == 128 * 128).sum())


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("documents", [None, torch.arange(600).view(2, -1) // 70], ids=["alone", "packed"])
def test_the_block_mask_is_what_torch_makes_of_the_rule(window: int | None, documents: Tensor | None) -> None:
    """Of a batch, compiled as on a GPU."""
    anchors = torch.stack([torch.arange(24) * 12, torch.arange(24) * 5 + 100])
    layout = Layout(anchors, (torch.arange(24) < 20).expand(2, -1), 300, 16, documents)
    expected = create_block_mask(mask_rule(layout, window), 2, None, layout.rows, 300 + layout.rows, device="cpu")
    before = statistics().compiled
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_tiles", attention._compiled_tiles)
        made = block_mask(layout, window)
    assert statistics().compiled - before == 1
    tensors = {name: value for name, value in vars(expected).items() if isinstance(value, Tensor)}
    assert len(tensors) == 8
    for name, value in tensors.items():
        assert torch.equal(getattr(made, name), value), name
    assert (made.seq_lengths, made.BLOCK_SIZE) == (expected.seq_lengths, expected.BLOCK_SIZE)


def test_each_kind_of_layer_there_is_gets_one_mask() -> None:
    masks = build_masks((SLIDING, FULL, SLIDING), 3, LAYOUT._replace(documents=DOCUMENTS), dense=True)
    assert masks.keys() == {FULL, SLIDING}
    for kind, window in ((FULL, None), (SLIDING, 3)):
        mask = masks[kind]
        assert isinstance(mask, Tensor)
        assert torch.equal(mask, brute_force(window, DOCUMENTS))
    assert build_masks((FULL,), None, LAYOUT, dense=True).keys() == {FULL}


@pytest.mark.parametrize("window", [1, 3, 5, 100])
def test_a_drafted_block_sees_what_it_sees_in_training(window: int) -> None:
    """With the context before its anchor kept, all of it or the nearest of it."""
    trained = dense_mask(LAYOUT, window)
    for block, anchor in enumerate(ANCHORS[0].tolist()):
        rows = trained[0, 0, block * BLOCK : (block + 1) * BLOCK]
        own = rows[:, CONTEXT + block * BLOCK : CONTEXT + (block + 1) * BLOCK]
        for kept in {anchor, min(anchor, window - 1)}:
            mask = drafting_mask(kept, BLOCK, window, torch.device("cpu"))
            assert mask is not None
            assert torch.equal(mask[0, 0], torch.cat((rows[:, anchor - kept : anchor], own), dim=1))
            assert not rows[:, : anchor - kept].any()


def test_a_drafted_block_sees_everything_in_a_full_layer() -> None:
    assert drafting_mask(7, BLOCK, None, torch.device("cpu")) is None
    anchor = torch.tensor([[7]])
    assert dense_mask(Layout(anchor, torch.ones_like(anchor, dtype=torch.bool), 7, BLOCK)).all()


def test_attention_under_the_mask_is_softmax_over_what_is_visible() -> None:
    query, key, value = qkv()
    mask = dense_mask(LAYOUT)
    output = attend(query, key, value, mask)
    for b, head, row in ((0, 0, 0), (0, 3, 7), (1, 2, 11)):
        visible = mask[b, 0, row].nonzero().flatten()
        scores = key[b, head // 2, visible] @ query[b, head, row] / math.sqrt(8)
        torch.testing.assert_close(output[b, head, row], scores.softmax(0) @ value[b, head // 2, visible])


def test_rows_of_padding_are_zero_and_their_gradients_are_finite() -> None:
    query, key, value = (t.requires_grad_() for t in qkv())
    output = attend(query, key, value, dense_mask(LAYOUT))
    assert output[1, :, 3 * BLOCK :].eq(0).all()
    output.sum().backward()
    assert query.grad is not None
    assert query.grad.isfinite().all()
    assert query.grad[1, :, 3 * BLOCK :].eq(0).all()


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
@every_rule
def test_attention_is_the_same_under_both_forms_of_the_mask(window: int | None, documents: Tensor | None) -> None:
    query, key, value = qkv()
    layout = LAYOUT._replace(documents=documents)
    with torch.no_grad():
        flex = attend(query, key, value, block_mask(layout, window))
        dense = attend(query, key, value, dense_mask(layout, window))
    torch.testing.assert_close(flex, dense)


@pytest.mark.gpu  # flex_attention has a backward only there
@every_rule
def test_a_gpu_computes_the_same_under_both_forms_of_the_mask(window: int | None, documents: Tensor | None) -> None:
    """Outputs and gradients, with flex_attention compiled, at sizes of several tiles."""
    torch.compiler.reset()  # or one function is compiled for too many rules
    generator = torch.Generator().manual_seed(0)
    context, block, blocks, heads, width = 512, 16, 32, 4, 64
    anchors = torch.randperm(context, generator=generator)[:blocks].sort().values.view(1, -1).cuda()
    keep = torch.arange(blocks, device="cuda").view(1, -1) < blocks - 3
    numbers = None if documents is None else (torch.arange(context, device="cuda").view(1, -1) // 100)
    rows = blocks * block
    shapes = ((1, heads, rows, width), (1, heads // 2, context + rows, width), (1, heads // 2, context + rows, width))
    inputs = [torch.randn(shape, generator=generator).cuda() for shape in shapes]
    results = []
    for form, function in ((block_mask, torch.compile(attend)), (dense_mask, attend)):
        query, key, value = (t.clone().requires_grad_() for t in inputs)
        output = function(query, key, value, form(Layout(anchors, keep, context, block, numbers), window))
        output.square().sum().backward()
        results.append([output, query.grad, key.grad, value.grad])
    for flex, dense in zip(*results, strict=True):
        torch.testing.assert_close(flex, dense, rtol=2e-2, atol=2e-2)  # TF32 products in flex_attention's kernels
