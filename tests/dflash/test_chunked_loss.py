"""The loss and its gradients do not depend on the chunks, and are what the formula says; so do the shares of rows that are right."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

import blocks
from loss import GRADIENTS, BlockLoss, Gradient, chunk_loss, chunked_loss
from safecompile.testing import CompileLimitError, no_compiles

BATCH, BLOCKS, SLOTS, WIDTH, VOCABULARY = 2, 8, 4, 8, 23
ROWS = BLOCKS * SLOTS
DPACE = {"weights": torch.ones(SLOTS), "dpace_alpha": torch.tensor(0.25)}
both_weights = pytest.mark.parametrize("change", [{}, DPACE], ids=["decay", "dpace"])


@pytest.fixture(autouse=True)
def nothing_compiled_by_other_tests() -> None:
    """Each has shapes of its own, and all together more than the compiler keeps."""
    torch.compiler.reset()


def inputs() -> dict[str, Any]:
    rng = torch.Generator().manual_seed(0)
    return {
        "draft_normed": torch.randn(BATCH, ROWS, WIDTH, generator=rng, requires_grad=True),
        "target_normed": torch.randn(BATCH, ROWS, WIDTH, generator=rng),
        "weights": torch.rand(SLOTS, generator=rng),
        "mask": torch.rand(BATCH, ROWS, generator=rng) > 0.3,
        "head": torch.randn(VOCABULARY, WIDTH, generator=rng),
        "kl_weight": torch.tensor(0.25),
        "labels": torch.randint(VOCABULARY, (BATCH, ROWS), generator=rng),
        "dpace_alpha": None,
    }


def whole_blocks(mask: Tensor, numbers: list[int]) -> Tensor:
    """Return the mask without the blocks of these numbers."""
    changed = mask.clone().unflatten(1, (BLOCKS, SLOTS))
    changed[:, numbers] = False
    return changed.flatten(1)


def plain(
    draft_normed: Tensor,
    target_normed: Tensor,
    weights: Tensor,
    mask: Tensor,
    head: Tensor,
    kl_weight: Tensor,
    labels: Tensor,
    dpace_alpha: Tensor | None,
    *,
    detached: bool = True,
) -> Tensor:
    """Return the loss of all rows at once in float64, with D-PACE's weights by loops over the slots of each block."""
    draft, target = draft_normed.double() @ head.double().T, target_normed.double() @ head.double().T
    ce = torch.nn.functional.cross_entropy(draft.flatten(0, 1), labels.flatten(), reduction="none").view(BATCH, ROWS)
    kl = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=target), torch.distributions.Categorical(logits=draft)
    )
    losses = (1 - kl_weight) * ce + kl_weight * kl
    if dpace_alpha is None:
        counted = weights.repeat(BLOCKS) * mask
        return (losses * counted).sum() / counted.sum()
    total, counting = losses.new_zeros(()), 0
    for row in range(BATCH):
        for block in range(BLOCKS):
            at = range(block * SLOTS, (block + 1) * SLOTS)
            counting += any(bool(mask[row, m]) for m in at)
            for j in at:
                weight = losses.new_zeros(())
                for m in range(j, at.stop):
                    if mask[row, m]:
                        passed = [i for i in range(at.start, m + 1) if mask[row, i]]
                        smoothed = [dpace_alpha + (1 - dpace_alpha) * torch.exp(-ce[row, i]) for i in passed]
                        weight = weight + torch.stack(smoothed).prod()
                total = total + mask[row, j] * (weight.detach() if detached else weight) * losses[row, j]
    return total / counting


def assert_same(found: BlockLoss, expected: Tensor, draft_normed: Tensor) -> None:
    (expected_gradient,) = torch.autograd.grad(expected, draft_normed)
    (gradient,) = torch.autograd.grad(found.loss, draft_normed)
    torch.testing.assert_close(found.loss, expected, check_dtype=False)
    torch.testing.assert_close(gradient, expected_gradient)


@both_weights
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("chunk_blocks", [2, 3, 8])
def test_chunked_is_unchunked(chunk_blocks: int, gradient: Gradient, change: dict[str, Any]) -> None:
    given = inputs() | change
    found = chunked_loss(**given, chunk_blocks=chunk_blocks, gradient=gradient)
    assert_same(found, plain(**given), given["draft_normed"])


@both_weights
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_without_a_teacher_it_is_the_cross_entropy_alone(gradient: Gradient, change: dict[str, Any]) -> None:
    given = inputs() | {"kl_weight": torch.tensor(0.0)} | change
    found = chunked_loss(**(given | {"target_normed": None}), chunk_blocks=4, gradient=gradient)
    assert_same(found, plain(**given), given["draft_normed"])


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_nothing_flows_back_to_the_target_or_the_head(gradient: Gradient) -> None:
    given = inputs()
    given["target_normed"].requires_grad_()
    chunked_loss(**given, chunk_blocks=4, gradient=gradient).loss.backward()
    assert given["target_normed"].grad is None
    assert given["head"].grad is None


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_no_gradient_flows_through_the_weights_of_dpace(gradient: Gradient) -> None:
    given = inputs() | DPACE
    (found,) = torch.autograd.grad(chunked_loss(**given, chunk_blocks=4, gradient=gradient).loss, given["draft_normed"])
    detached, attached = (
        torch.autograd.grad(plain(**given, detached=detached), given["draft_normed"])[0] for detached in (True, False)
    )
    torch.testing.assert_close(found, detached)
    assert (found - attached).abs().max() > 0.01


@both_weights
def test_rows_outside_the_mask_change_nothing(change: dict[str, Any]) -> None:
    given = inputs() | change
    before = chunked_loss(**given, chunk_blocks=4)
    changed = given["draft_normed"].detach().clone()
    changed[~given["mask"]] += 1.0
    after = chunked_loss(**{**given, "draft_normed": changed}, chunk_blocks=4)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@both_weights
def test_blocks_that_pad_change_nothing(change: dict[str, Any]) -> None:
    """Of eight blocks the last four do not count, as if they were not there."""
    given = inputs() | change
    padded = given | {"mask": whole_blocks(given["mask"], [4, 5, 6, 7])}
    cut = {
        name: value[:, : ROWS // 2] if name in ("draft_normed", "target_normed", "mask", "labels") else value
        for name, value in given.items()
    }
    found, expected = (chunked_loss(**one, chunk_blocks=4) for one in (padded, cut))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    gradients = [torch.autograd.grad(one.loss, given["draft_normed"])[0] for one in (found, expected)]
    assert torch.equal(*gradients)
    assert gradients[0][:, ROWS // 2 :].eq(0).all()


@both_weights
def test_without_a_row_that_counts_the_loss_is_zero(change: dict[str, Any]) -> None:
    given = inputs() | change
    given["mask"] = torch.zeros_like(given["mask"])
    found = chunked_loss(**given, chunk_blocks=4)
    found.loss.backward()
    assert found.loss == 0
    assert given["draft_normed"].grad is not None
    assert given["draft_normed"].grad.eq(0).all()
    assert found.accuracy.isnan().all()
    assert found.acceptance.isnan().all()


def test_without_smoothing_left_the_weights_of_dpace_count_the_slots_that_follow() -> None:
    confidence = torch.rand(3, 7)
    everything = torch.ones(3, 7, dtype=torch.bool)
    weights = blocks.dpace_weights(confidence, everything, torch.tensor(1.0))
    assert weights.tolist() == [[7, 6, 5, 4, 3, 2, 1]] * 3  # B - j
    nearly = blocks.dpace_weights(confidence, everything, torch.tensor(1 - 1e-6))
    torch.testing.assert_close(nearly, weights, rtol=1e-4, atol=0)


def test_a_slot_that_does_not_count_neither_weighs_nor_lowers_the_weights_of_others() -> None:
    confidence, counts = torch.tensor([0.5, 0.0, 0.25]), torch.tensor([True, False, True])
    weights = blocks.dpace_weights(confidence, counts, torch.tensor(0.5))
    assert weights.tolist() == [0.75 + 0.75 * 0.625, 0.0, 0.75 * 0.625]


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_another_smoothing_and_other_content_compile_nothing_new(gradient: Gradient) -> None:
    given = inputs() | DPACE
    chunked_loss(**given, chunk_blocks=4, gradient=gradient).loss.backward()
    given |= {
        "dpace_alpha": torch.tensor(0.75),
        "kl_weight": torch.tensor(0.5),
        "mask": whole_blocks(given["mask"], [0, 5]),
        "labels": given["labels"].flip(1),
    }
    with no_compiles():
        found = chunked_loss(**given, chunk_blocks=4, gradient=gradient)
        found.loss.backward()
    assert_same(chunked_loss(**given, chunk_blocks=4, gradient=gradient), plain(**given), given["draft_normed"])


def test_control_a_smoothing_that_is_no_tensor_is_compiled_in() -> None:
    given: dict[str, Any] = inputs() | DPACE | {"dpace_alpha": 0.25}
    chunked_loss(**given, chunk_blocks=4)
    with pytest.raises(CompileLimitError), no_compiles():
        chunked_loss(**(given | {"dpace_alpha": 0.75}), chunk_blocks=4)


@both_weights
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_shares_are_those_of_a_plain_loop(gradient: Gradient, change: dict[str, Any]) -> None:
    given = inputs() | change
    best = (given["draft_normed"] @ given["head"].T).argmax(-1)
    known = torch.rand(BATCH, ROWS, generator=torch.Generator().manual_seed(1)) > 0.4
    given["labels"] = torch.where(known, best, (best + 1) % VOCABULARY)
    found = chunked_loss(**given, chunk_blocks=2, gradient=gradient)
    assert not found.accuracy.requires_grad
    assert not found.acceptance.requires_grad
    mask, right = (rows.view(-1, SLOTS).tolist() for rows in (given["mask"], known))
    accuracy, acceptance = [], []
    for slot in range(SLOTS):
        counted = [r[slot] for m, r in zip(mask, right, strict=True) if m[slot]]
        reached = [all(r[: slot + 1]) for m, r in zip(mask, right, strict=True) if all(m[: slot + 1])]
        accuracy.append(sum(counted) / len(counted))
        acceptance.append(sum(reached) / len(reached))
    assert 0 < acceptance[-1] < acceptance[0] < 1
    torch.testing.assert_close(found.accuracy, torch.tensor(accuracy))
    torch.testing.assert_close(found.acceptance, torch.tensor(acceptance))


def test_a_label_that_ties_for_the_largest_logit_is_right_and_one_below_it_is_not() -> None:
    head = torch.tensor([[1.0], [1.0], [0.5]])
    counted = torch.ones(1, 1, 3)
    _, correct = chunk_loss(
        torch.ones(1, 3, 1), None, counted, head, torch.tensor(0.0), torch.tensor([[0, 1, 2]]), None
    )
    assert correct.tolist() == [[[True, True, False]]]


def test_a_slot_that_no_block_counts_in_has_no_share() -> None:
    right = torch.tensor([[[True, True, True], [False, True, True]]])
    counts = torch.tensor([[[True, True, False], [True, False, False]]])
    accuracy, acceptance = blocks.shares(right, counts)
    assert accuracy.tolist()[:2] == [0.5, 1.0]
    assert acceptance.tolist()[:2] == [0.5, 1.0]
    assert math.isnan(accuracy[2])
    assert math.isnan(acceptance[2])


@both_weights
def test_the_largest_logits_are_those_of_the_softmax(change: dict[str, Any]) -> None:
    """As Inductor sees it: which labels are right takes no pass over the logits of its own, which are large."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, example: object) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=keep,
        bw_compiler=keep,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    given = inputs() | change
    counted = torch.ones(BATCH, BLOCKS, SLOTS)
    rows, head, kl_weight, labels = (given[name] for name in ("draft_normed", "head", "kl_weight", "labels"))
    whole = torch.compile(inspect.unwrap(chunk_loss), backend=backend, fullgraph=True, dynamic=False)
    whole(rows, None, counted, head, kl_weight, labels, given["dpace_alpha"])[0].backward()
    forward, backward = graphs
    assert count(forward, torch.ops.aten.amax.default) == 1
    assert count(forward, torch.ops.aten.mm.default) == 1
    assert count(backward, torch.ops.aten.amax.default) == 0


def count(graph: torch.fx.GraphModule, target: object) -> int:
    return sum(node.target is target for node in graph.graph.nodes)
