"""The optimizer and its learning-rate schedule, for the drafter and for the bundled target."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

OptimizerName = Literal["adamw", "muon"]


class Muon(torch.optim.Optimizer):
    """Momentum whose step on a weight matrix is made orthogonal (Jordan et al. 2024, "Muon").

    `torch.optim.Muon` is the same method, but works in bfloat16: on a CPU without fast bfloat16 it took 0.62 of the 0.88
    seconds of a training step of the bundled target. This one works in float32, on all matrices of one shape together.

    Args:
        parameters: matrices, all with gradients at every step.
        lr: learning rate; a step's size does not depend on the gradient's.
        momentum: share of the past in the (Nesterov) momentum.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no use for a closure here
        """Make one step with the gradients at hand."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                directions = torch.stack([self._direction(p, group["momentum"]) for p in parameters])
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, update in zip(parameters, orthogonalize(directions), strict=True):
                    parameter.sub_(update, alpha=scale)

    def _direction(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        past: Tensor = state["momentum"]
        past.lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(past, momentum)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Move the singular values of ``[n, rows, columns]`` close to 1, with five Newton-Schulz steps of degree five (Muon).

    The coefficients are those of Muon: they trade accuracy at 1 for growth near 0, and leave values of about 0.7 to 1.2.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


class Optimizers:
    """Step several optimizers as one, with one schedule and gradient clipping.

    The schedule multiplies every learning rate by a linear warm-up and then a cosine down to zero; the gradient's norm is
    clipped first (paper, A.1: cosine, warm-up ratio 0.04, clipping at 1.0).
    """

    def __init__(
        self, optimizers: Iterable[torch.optim.Optimizer], *, steps: int, warmup_ratio: float, clip: float
    ) -> None:
        self._optimizers = list(optimizers)
        self._clip = clip
        warmup_steps = max(1, round(steps * warmup_ratio))

        def factor(step: int) -> float:
            return schedule(step, steps=steps, warmup_steps=warmup_steps)

        self._factor = factor
        self._schedulers = [torch.optim.lr_scheduler.LambdaLR(o, factor) for o in self._optimizers]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters that are stepped."""
        return [p for o in self._optimizers for group in o.param_groups for p in group["params"]]

    def step(self) -> float:
        """Clip, step, move the schedule on, drop the gradients; return the gradient's norm before clipping."""
        norm = nn.utils.clip_grad_norm_(self.parameters, self._clip)
        for optimizer, scheduler in zip(self._optimizers, self._schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def state(self) -> dict[str, Tensor]:
        """Return what the optimizers have gathered, by names of the form ``optimizer.parameter.what``, the first two being numbers.

        These are the tensors themselves: the next step changes them.
        """
        return {
            f"{number}.{parameter}.{what}": value
            for number, optimizer in enumerate(self._optimizers)
            for parameter, gathered in optimizer.state_dict()["state"].items()
            for what, value in gathered.items()
        }

    def restore(self, state: Mapping[str, Tensor], step: int) -> None:
        """Go on from a copy of a `state`, and from the schedule's place after ``step`` steps."""
        gathered: list[dict[int, dict[str, Tensor]]] = [{} for _ in self._optimizers]
        for name, value in state.items():
            number, parameter, what = name.split(".")
            gathered[int(number)].setdefault(int(parameter), {})[what] = value.clone()
        for optimizer, scheduler, own in zip(self._optimizers, self._schedulers, gathered, strict=True):
            optimizer.load_state_dict({"state": own, "param_groups": optimizer.state_dict()["param_groups"]})
            scheduler.last_epoch = step
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * self._factor(step)


def schedule(step: int, *, steps: int, warmup_steps: int) -> float:
    """Return the factor of the learning rate at ``step`` (from 0): linear up over the warm-up, cosine down to 0 (A.1)."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def build(
    model: nn.Module,
    name: OptimizerName,
    *,
    lr: float,
    muon_lr: float,
    steps: int,
    warmup_ratio: float,
    clip: float,
) -> Optimizers:
    """Build the optimizer of all trainable parameters of ``model``.

    ``adamw`` is the paper's choice (A.1). ``muon`` gives every weight matrix except embeddings to Muon at ``muon_lr`` and
    the rest to AdamW at ``lr``; on models as small as the demo's it learns much faster.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if name == "adamw":
        optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(trainable, lr=lr, weight_decay=0.0)]
    else:
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        matrices = [p for p in trainable if p.ndim == 2 and id(p) not in embeddings]
        chosen = {id(p) for p in matrices}
        others = [p for p in trainable if id(p) not in chosen]
        optimizers = [Muon(matrices, lr=muon_lr)]
        if others:
            optimizers.append(torch.optim.AdamW(others, lr=lr, weight_decay=0.0))
    return Optimizers(optimizers, steps=steps, warmup_ratio=warmup_ratio, clip=clip)
