"""What the checkpoint wrapper needs to know of torch's non-reentrant checkpoint."""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any

import torch.utils.checkpoint

__all__ = ["recompute_to_the_end"]


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
