"""Who may attend to whom, against a definition written out in loops, in both forms of the mask."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from attention import attend, build_mask, dense_mask, mask_rule

CONTEXT, BLOCK = 12, 4
ANCHORS = torch.tensor([[0, 3, 5, 11], [2, 4, 7, 0]])
KEEP = torch.tensor([[True, True, True, True], [True, True, True, False]])


def brute_force(anchors: Tensor, keep: Tensor) -> Tensor:
    batch, blocks = anchors.shape
    mask = torch.zeros(batch, 1, blocks * BLOCK, CONTEXT + blocks * BLOCK, dtype=torch.bool)
    for b in range(batch):
        for n in range(blocks):
            for slot in range(BLOCK):
                row = mask[b, 0, n * BLOCK + slot]
                for position in range(CONTEXT):
                    row[position] = bool(keep[b, n]) and position < int(anchors[b, n])
                for other in range(blocks * BLOCK):
                    row[CONTEXT + other] = bool(keep[b, n]) and other // BLOCK == n
    return mask


def qkv(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    rows = ANCHORS.shape[1] * BLOCK
    query = torch.randn(2, 4, rows, 8, generator=rng)
    key, value = (torch.randn(2, 2, CONTEXT + rows, 8, generator=rng) for _ in range(2))
    return query, key, value


def test_the_dense_mask_is_the_definition() -> None:
    assert torch.equal(dense_mask(ANCHORS, KEEP, CONTEXT, BLOCK), brute_force(ANCHORS, KEEP))


def test_the_cpu_gets_the_dense_mask() -> None:
    assert isinstance(build_mask(ANCHORS, KEEP, CONTEXT, BLOCK), Tensor)


def test_attention_under_the_mask_is_softmax_over_what_is_visible() -> None:
    query, key, value = qkv()
    mask = dense_mask(ANCHORS, KEEP, CONTEXT, BLOCK)
    output = attend(query, key, value, mask)
    for b, head, row in ((0, 0, 0), (0, 3, 7), (1, 2, 11)):
        visible = mask[b, 0, row].nonzero().flatten()
        scores = key[b, head // 2, visible] @ query[b, head, row] / math.sqrt(8)
        torch.testing.assert_close(output[b, head, row], scores.softmax(0) @ value[b, head // 2, visible])


def test_rows_of_padding_are_zero_and_their_gradients_are_finite() -> None:
    query, key, value = (t.requires_grad_() for t in qkv())
    output = attend(query, key, value, dense_mask(ANCHORS, KEEP, CONTEXT, BLOCK))
    assert output[1, :, 3 * BLOCK :].eq(0).all()
    output.sum().backward()
    assert query.grad is not None
    assert query.grad.isfinite().all()
    assert query.grad[1, :, 3 * BLOCK :].eq(0).all()


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
def test_the_block_mask_shows_the_same_as_the_dense_one() -> None:
    query, key, value = qkv()
    rows = query.shape[2]
    block_mask = create_block_mask(
        mask_rule(ANCHORS, KEEP, CONTEXT, BLOCK), 2, None, rows, CONTEXT + rows, device="cpu"
    )
    with torch.no_grad():
        flex = attend(query, key, value, block_mask)
        dense = attend(query, key, value, dense_mask(ANCHORS, KEEP, CONTEXT, BLOCK))
    torch.testing.assert_close(flex, dense)
