"""The loss and its gradients do not depend on the chunks, and are what the formula says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from loss import GRADIENTS, Gradient, chunked_loss

ROWS, WIDTH, VOCABULARY = 32, 8, 23


def inputs() -> dict[str, Any]:
    rng = torch.Generator().manual_seed(0)
    return {
        "draft_normed": torch.randn(2, ROWS, WIDTH, generator=rng, requires_grad=True),
        "target_normed": torch.randn(2, ROWS, WIDTH, generator=rng),
        "weights": torch.rand(ROWS, generator=rng),
        "mask": torch.rand(2, ROWS, generator=rng) > 0.3,
        "head": torch.randn(VOCABULARY, WIDTH, generator=rng),
        "kl_weight": torch.tensor(0.25),
        "labels": torch.randint(VOCABULARY, (2, ROWS), generator=rng),
    }


def plain(
    draft_normed: Tensor,
    target_normed: Tensor,
    weights: Tensor,
    mask: Tensor,
    head: Tensor,
    kl_weight: Tensor,
    labels: Tensor,
) -> Tensor:
    draft, target = draft_normed @ head.T, target_normed @ head.T
    ce = torch.nn.functional.cross_entropy(draft.flatten(0, 1), labels.flatten(), reduction="none").view(2, ROWS)
    kl = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=target), torch.distributions.Categorical(logits=draft)
    )
    counted = weights * mask
    return (((1 - kl_weight) * ce + kl_weight * kl) * counted).sum() / counted.sum()


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("chunk_rows", [8, 16, 32])
def test_chunked_is_unchunked(chunk_rows: int, gradient: Gradient) -> None:
    given = inputs()
    expected = plain(**given)
    (expected_gradient,) = torch.autograd.grad(expected, given["draft_normed"])
    loss = chunked_loss(**given, chunk_rows=chunk_rows, gradient=gradient)
    (found,) = torch.autograd.grad(loss, given["draft_normed"])
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, expected_gradient)


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_without_a_teacher_it_is_the_cross_entropy_alone(gradient: Gradient) -> None:
    given = inputs() | {"kl_weight": torch.tensor(0.0)}
    expected = plain(**given)
    (expected_gradient,) = torch.autograd.grad(expected, given["draft_normed"])
    loss = chunked_loss(**(given | {"target_normed": None}), chunk_rows=16, gradient=gradient)
    (found,) = torch.autograd.grad(loss, given["draft_normed"])
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, expected_gradient)


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_nothing_flows_back_to_the_target_or_the_head(gradient: Gradient) -> None:
    given = inputs()
    given["target_normed"].requires_grad_()
    chunked_loss(**given, chunk_rows=16, gradient=gradient).backward()
    assert given["target_normed"].grad is None
    assert given["head"].grad is None


def test_rows_outside_the_mask_change_nothing() -> None:
    given = inputs()
    before = chunked_loss(**given, chunk_rows=16)
    changed = given["draft_normed"].detach().clone()
    changed[~given["mask"]] += 1.0
    assert torch.equal(before, chunked_loss(**{**given, "draft_normed": changed}, chunk_rows=16))


def test_without_a_row_that_counts_the_loss_is_zero() -> None:
    given = inputs()
    given["mask"] = torch.zeros_like(given["mask"])
    loss = chunked_loss(**given, chunk_rows=16)
    loss.backward()
    assert loss == 0
    assert given["draft_normed"].grad is not None
    assert given["draft_normed"].grad.eq(0).all()
