"""Four threads train with dropout in a checkpointed, compiled block: each gets the gradients that it would get alone."""

from __future__ import annotations

import argparse
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.utils.checkpoint
from torch.nn.functional import dropout, gelu

from safecompile import capture_context, checkpoint, statistics, thread_safe_compile

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--backend", default="aot_eager", help="for torch.compile; inductor for real use")
parser.add_argument("--stock", action="store_true", help="with torch.compile and torch.utils.checkpoint instead")
options = parser.parse_args()

compiled: Any = thread_safe_compile
checkpointed: Any = checkpoint
if options.stock:
    compiled = torch.compile
    checkpointed = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)


@compiled(backend=options.backend)
def block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return gelu(x @ weight)


def region(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return dropout(block(x, weight), 0.5)


def gradient_is_right(seed: int) -> bool:
    weight = torch.eye(64, requires_grad=True)
    x = torch.full((32, 64), 0.01 * seed)
    y = checkpointed(region, x, weight)
    kept = y.detach() != 0  # where the forward's dropout kept a value
    found = torch.autograd.grad(y.sum(), weight)[0]  # computes the region again
    expected = torch.autograd.grad(gelu(x @ weight), weight, kept * 2.0)[0]
    return torch.allclose(found, expected)


with ThreadPoolExecutor(4, initializer=capture_context().apply) as pool:
    right = list(pool.map(gradient_is_right, range(1, 101)))
print(f"{sum(right)} of {len(right)} gradients are right")
if not options.stock:
    assert all(right)
    assert statistics().compiled == 1
