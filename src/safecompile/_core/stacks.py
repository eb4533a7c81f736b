"""The frames of other threads, which go on running while one looks."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from safecompile._core.forks import lock_across_forks

__all__ = ["outwards", "stacks_of_others"]

_looking = lock_across_forks()


def stacks_of_others() -> dict[int, list[FrameType]]:
    """Return each other thread's frames by its ident, the innermost first.

    Let go of them soon: they keep their variables alive.
    """
    with _looking:
        # Before Python 3.12 the collector can run while a frame object is made, and let the frame's own thread go on,
        # which takes the frame away under it: a crash.
        collects = gc.isenabled()
        gc.disable()
        try:
            tops = sys._current_frames()
            tops.pop(threading.get_ident())
            return {ident: list(outwards(top)) for ident, top in tops.items()}
        finally:
            if collects:
                gc.enable()


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Return ``frame``, which must be the calling thread's own, and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back
