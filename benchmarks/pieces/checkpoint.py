"""A stack of checkpointed blocks: what the library's checkpoint costs over torch's that is not reentrant."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.pieces.variants import together


class Blocks:
    """A stack of blocks, each in a checkpointed region."""

    def __init__(self, layers: int, width: int, tokens: int, dropout: float) -> None:
        import torch
        from torch import nn

        torch.set_num_threads(1)
        self._blocks = [
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Dropout(dropout),
                nn.Linear(4 * width, width),
            )
            for _ in range(layers)
        ]
        self._x = torch.randn(tokens, width, requires_grad=True)

    def step(self, variant: str) -> None:
        """Run forward and backward."""
        from torch.utils.checkpoint import checkpoint

        import safecompile

        x = self._x
        for block in self._blocks:
            if variant == "safecompile":
                x = x + safecompile.checkpoint(block, x)
            else:
                x = x + checkpoint(block, x, use_reentrant=False)
        x.square().mean().backward()


VARIANTS = ("stock", "safecompile")


def checkpoint_time(*, dropout: float, steps: int, layers: int, width: int, tokens: int) -> dict[str, Any]:
    """Measure steps of a stack of checkpointed blocks in one thread, in pairs, in CPU time of the thread."""
    blocks = Blocks(layers, width, tokens, dropout)
    measured: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for index in range(steps + 3):
        for variant in VARIANTS[:: -1 if index % 2 else 1]:
            started = time.thread_time()
            blocks.step(variant)
            if index >= 3:
                measured[variant].append(time.thread_time() - started)
    return measured


def checkpoint_memory(*, variant: str, dropout: float, layers: int, width: int, tokens: int) -> dict[str, Any]:
    """Measure how much the most memory that the process ever had grows in two steps, in bytes."""
    import ctypes
    import resource

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(-3, 64 * 1024)  # M_MMAP_THRESHOLD: give what is freed back at once, in glibc
    Blocks(1, 8, 8, dropout).step(variant)
    blocks = Blocks(layers, width, tokens, dropout)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):
        blocks.step(variant)
    return {"bytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024}


def checkpoint_threads(
    *, threads: int, rounds: int, steps: int, layers: int, width: int, tokens: int
) -> dict[str, Any]:
    """Let threads step through blocks that draw nothing; measure the wall time until the last has made its steps."""
    stacks = [Blocks(layers, width, tokens, 0.0) for _ in range(threads)]

    def seconds(variant: str) -> float:
        def work(index: int) -> None:
            for _ in range(steps):
                stacks[index].step(variant)

        began, ended = together(threads, work)
        return ended - began

    measured: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for index in range(rounds + 1):
        for variant in VARIANTS[:: -1 if index % 2 else 1]:
            took = seconds(variant)
            if index:
                measured[variant].append(took)
    return measured
