"""What is measured, a module a subject and a function a piece; each runs in a process of its own.

``python -m benchmarks.pieces NAME OPTIONS``: options are keyword arguments as JSON; the last line of output is the result
as JSON. Times are in seconds, memory is in bytes.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

PIECES = {
    "herd": "herd",
    "warm": "warm",
    "alone": "beside",
    "beside": "beside",
    "throughput": "throughput",
    "load": "load",
    "imports": "imports",
    "memory": "memory",
    "checkpoint_time": "checkpoint",
    "checkpoint_memory": "checkpoint",
    "checkpoint_threads": "checkpoint",
}
"""By piece, its module: imported when it is run, because what imports take is one of the things measured."""


def run(piece: str, options: dict[str, Any]) -> dict[str, Any]:
    measure = getattr(import_module(f"benchmarks.pieces.{PIECES[piece]}"), piece)
    result: dict[str, Any] = measure(**options)
    return result
