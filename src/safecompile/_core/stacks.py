"""The frames of other threads, which go on running while one looks."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from safecompile._core.forks import lock_across_forks

_looking = lock_across_forks()

MOST_LOOKS = 100
_GENERATOR = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


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
            stacks: dict[int, list[FrameType]] = {}
            cut: list[int] = []
            for _ in range(MOST_LOOKS):
                tops = sys._current_frames()
                tops.pop(threading.get_ident())
                stacks = {
                    i: stacks[i] if i in stacks and i not in cut else list(outwards(top)) for i, top in tops.items()
                }
                # A generator that has stopped meanwhile does not tell any more who had called it.
                cut = [ident for ident, frames in stacks.items() if frames[-1].f_code.co_flags & _GENERATOR]
                if not cut:
                    break
            return stacks
        finally:
            if collects:
                gc.enable()


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Return ``frame``, which must be the calling thread's own, and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back
