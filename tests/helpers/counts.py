"""What the calls of one guarded callable came to, where several callables have the same function."""

from __future__ import annotations

import inspect
from typing import Any

from safecompile._core.guarded import CallableStatistics, Guarded


def counted(guarded: Any) -> CallableStatistics:
    """Return the counts of a guarded function or method."""
    context = inspect.getclosurevars(guarded).nonlocals["self"]
    record: Guarded = vars(context)["_safecompile_guarded"]
    return record.statistics()
