"""The schedule, and Muon's orthogonal steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import optimizer


def test_the_schedule_warms_up_and_ends_at_zero() -> None:
    factors = [optimizer.schedule(step, steps=100, warmup_steps=4) for step in range(101)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[52] == pytest.approx(0.5)
    assert factors[100] == pytest.approx(0.0)
    assert factors[4:] == sorted(factors[4:], reverse=True)


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (16, 16)])
def test_a_muon_step_has_singular_values_near_one(shape: tuple[int, int]) -> None:
    matrices = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(optimizer.orthogonalize(matrices))
    assert values.max() < 1.3
    assert values.median() > 0.6


def test_the_compiled_step_clips_and_steps_like_the_one_of_torch() -> None:
    rng = torch.Generator().manual_seed(0)
    gradients = [[torch.randn(8, 8, generator=rng), torch.randn(8, generator=rng)] for _ in range(12)]
    results = []
    for cls in (torch.optim.AdamW, optimizer.CompiledAdamW):
        parameters = [nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8))]
        steps = optimizer.Optimizers(
            [cls(parameters, lr=0.01, weight_decay=0.1)], steps=12, warmup_ratio=0.2, clip=float(gradients[0][0].norm())
        )
        for same in gradients:  # some are clipped, some are not
            for parameter, gradient in zip(parameters, same, strict=True):
                parameter.grad = gradient.clone()
            steps.step()
        results.append(parameters)
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_each_optimizer_lowers_a_loss(name: optimizer.OptimizerName) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 7))
    steps = optimizer.build(model, name, lr=0.01, muon_lr=0.02, steps=60, warmup_ratio=0.1, clip=1.0)
    assert {id(p) for p in steps.parameters} == {id(p) for p in model.parameters()}
    tokens = torch.arange(7)
    losses = []
    for _ in range(60):
        loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 7)
        loss.backward()
        steps.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_weights_decay_by_the_learning_rate_at_a_place_of_the_schedule(name: optimizer.OptimizerName) -> None:
    model = nn.Linear(4, 4)
    steps = optimizer.build(model, name, lr=0.1, muon_lr=0.1, steps=100, warmup_ratio=0.04, clip=1.0, weight_decay=0.5)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    steps.move_to(52)  # half of the peak
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    steps.step()
    for parameter, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), old * (1 - 0.1 * 0.5 * 0.5))
