"""What the checkpoint wrapper needs to know of torch's non-reentrant checkpoint."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.utils import _pytree as pytree  # the public torch.utils.pytree is newer than torch 2.6
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["draws_random_numbers", "recompute_to_the_end", "tensors_in"]


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def recompute_to_the_end() -> bool:
    """Switch early stopping off for the checkpoint whose forward runs now; tell whether that could be done.

    A recomputation that stops once it has every saved tensor draws fewer random numbers than its forward,
    and the two could not be compared.
    """
    code = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            generator: Any = frame.f_locals.get("gen")
            region = generator and generator.gi_frame and generator.gi_frame.f_locals.get("new_frame")
            if region is None or not hasattr(region, "early_stop"):
                return False
            region.early_stop = False
            return True
        frame = frame.f_back
    return False


def draws_random_numbers(function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Call ``function`` and tell whether it draws from a generator."""
    with torch.no_grad(), _Draws() as draws:
        function(*args, **kwargs)
    return bool(draws.seen)


class _Draws(TorchDispatchMode):
    """Notices random operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: bool = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))
