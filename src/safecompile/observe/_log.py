"""The events as lines of the log ``safecompile``, with the levels of torch's logs."""

from __future__ import annotations

import logging
from typing import Any

from safecompile._core.events import Compile, EagerRun, RecompileLimit, Wait

__all__ = ["write"]

log = logging.getLogger("safecompile")

# Seconds from which on a wait is more than what a compile now and then costs.
LONG_WAIT = 1.0

# Functions of which an eager run was told already.
_ran_eagerly: set[tuple[str, str, int]] = set()


def write(event: Any) -> None:
    """Log one event: what is rare or long at INFO, the rest at DEBUG."""
    level, text = _line(event)
    log.log(level, "%s", text)


def _line(event: Any) -> tuple[int, str]:
    if isinstance(event, Wait):
        had = f", which thread {event.holder!r} had ({event.doing})" if event.holder else ""
        text = f"thread {event.thread!r} waited {event.seconds:.3f} s for the FX-trace lock{had}"
        return (logging.INFO if event.seconds > LONG_WAIT else logging.DEBUG), text
    place = f"{event.function} ({event.filename}:{event.line})"
    if isinstance(event, Compile):
        ended = f"failed to compile ({event.error})" if event.error else "compiled"
        why = event.reasons if log.isEnabledFor(logging.DEBUG) else event.reasons[:1]
        text = f"{event.kind} of {place} {ended} in {event.seconds:.3f} s in thread {event.thread!r}"
        return logging.INFO, ": ".join(filter(None, [text, "; or ".join(why)]))
    if isinstance(event, EagerRun):
        key = (event.function, event.filename, event.line)
        level = logging.DEBUG if key in _ran_eagerly else logging.INFO
        _ran_eagerly.add(key)
        return level, f"{place} runs eagerly in thread {event.thread!r}: {event.reason}"
    assert isinstance(event, RecompileLimit)  # noqa: S101
    graphs = "; ".join(f"thread {thread!r}: {reason}" for thread, reason in event.reasons)
    return logging.INFO, f"{place} has {event.count} graphs, and its recompile limit is {event.limit}: {graphs}"
