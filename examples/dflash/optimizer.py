"""The optimizer and its learning-rate schedule, for the drafter and for the bundled target."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from backend import BACKEND
from safecompile import thread_safe_compile

OptimizerName = Literal["adamw", "muon"]


class Muon(torch.optim.Optimizer):
    """Momentum whose step on a weight matrix is made orthogonal (Jordan et al. 2024, "Muon").

    `torch.optim.Muon` is the same method, but works in bfloat16: on a CPU without fast bfloat16 it took 0.62 of the 0.88
    seconds of a training step of the bundled target. This one works in float32, on all matrices of one shape together.

    Args:
        parameters: matrices, all with gradients at every step.
        lr: learning rate; a step's size does not depend on the gradient's.
        momentum: share of the past in the (Nesterov) momentum.
        weight_decay: share of the weights that a step takes away, times the learning rate (as in AdamW).
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

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
                    if group["weight_decay"]:
                        parameter.mul_(1 - group["lr"] * group["weight_decay"])
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


class CompiledAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` whose step is one compiled function, which scales the gradients on the way.

    Clipping and stepping the 1.05 billion float32 weights of an 8B drafter took 8.3 ms on an H200, and 12.2 ms with torch's
    fused step after its clipping (torch 2.11).

    Args:
        parameters: all with gradients at every step, on one device.
        lr, weight_decay: as in `torch.optim.AdamW`.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float, weight_decay: float) -> None:
        super().__init__(parameters, lr=lr, weight_decay=weight_decay, capturable=True)

    @torch.no_grad()
    def step(self, closure: None = None, *, factor: Tensor) -> None:  # type: ignore[override]  # no use for a closure here
        """Make one step with the gradients times ``factor``, a scalar tensor."""
        for group in self.param_groups:
            parameters = group["params"]
            states = [self.state[p] for p in parameters]
            for parameter, state in zip(parameters, states, strict=True):
                if not state:
                    state["step"] = torch.zeros((), device=parameter.device)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            _adamw(
                parameters,
                [p.grad for p in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [state["step"] for state in states],
                factor,
                torch.full((), group["lr"], device=factor.device),  # a number would be compiled in
                group["betas"],
                group["weight_decay"],
                group["eps"],
            )


@thread_safe_compile(backend=BACKEND, dynamic=False)
def _adamw(
    parameters: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    factor: Tensor,
    lr: Tensor,
    betas: tuple[float, float],
    weight_decay: float,
    eps: float,
) -> None:
    adamw(
        parameters,
        [gradient * factor for gradient in gradients],
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        foreach=True,
        capturable=True,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )


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

    @property
    def rates(self) -> dict[str, float]:
        """Learning rates of the next step, by the options' names: ``lr`` of AdamW, ``muon_lr`` of Muon."""
        return {"muon_lr" if isinstance(o, Muon) else "lr": float(o.param_groups[0]["lr"]) for o in self._optimizers}

    def step(self) -> Tensor:
        """Clip, step, move the schedule on, drop the gradients; return the gradient's norm before clipping, a scalar tensor.

        Nothing waits for the device here.
        """
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        for optimizer, scheduler in zip(self._optimizers, self._schedulers, strict=True):
            if isinstance(optimizer, CompiledAdamW):
                optimizer.step(factor=(self._clip / (norm + 1e-6)).clamp(max=1.0))
            else:
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                nn.utils.clip_grads_with_norm_(parameters, self._clip, norm)
                optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
        return norm

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
        for optimizer, own in zip(self._optimizers, gathered, strict=True):
            optimizer.load_state_dict({"state": own, "param_groups": optimizer.state_dict()["param_groups"]})
        self.move_to(step)

    def move_to(self, step: int) -> None:
        """Take the learning rates of the schedule's place after ``step`` steps, however many were made."""
        for optimizer, scheduler in zip(self._optimizers, self._schedulers, strict=True):
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
    weight_decay: float = 0.0,
) -> Optimizers:
    """Build the optimizer of all trainable parameters of ``model``.

    ``adamw`` is the paper's choice (A.1). ``muon`` gives every weight matrix except embeddings to Muon at ``muon_lr`` and
    the rest to AdamW at ``lr``; on models as small as the demo's it learns much faster. Weights decay in both alike.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    # Compiling it takes longer on a CPU than a short run saves.
    adamw_class = CompiledAdamW if all(p.is_cuda for p in trainable) else torch.optim.AdamW
    if name == "adamw":
        optimizers: list[torch.optim.Optimizer] = [adamw_class(trainable, lr=lr, weight_decay=weight_decay)]
    else:
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        matrices = [p for p in trainable if p.ndim == 2 and id(p) not in embeddings]
        chosen = {id(p) for p in matrices}
        others = [p for p in trainable if id(p) not in chosen]
        optimizers = [Muon(matrices, lr=muon_lr, weight_decay=weight_decay)]
        if others:
            optimizers.append(adamw_class(others, lr=lr, weight_decay=weight_decay))
    return Optimizers(optimizers, steps=steps, warmup_ratio=warmup_ratio, clip=clip)
