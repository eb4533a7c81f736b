"""Arguments that another thread changes while Dynamo looks at them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from safecompile._core.errors import ArgumentChangedError
from safecompile._patches.company import alone

__all__ = ["Arguments"]

# How many containers and their values are remembered; what is bigger counts as unchanged.
MOST_VALUES = 100_000


class Arguments:
    """The containers among a frame's locals, as they were before Dynamo looked at them."""

    def __init__(self, f_locals: Mapping[str, Any]) -> None:
        self._values = {} if alone() else {name: value for name, value in f_locals.items() if _can_change(value)}
        self._before = {name: _contents(value) for name, value in self._values.items()}

    def blame(self, error: Exception, function: str) -> ArgumentChangedError | None:
        """Return the error to raise in the place of an internal one that their change has caused (E8; pytorch#196208)."""
        from torch._dynamo.exc import InternalTorchDynamoError

        if alone() or not isinstance(error, (InternalTorchDynamoError, AssertionError)):
            return None
        changed = [name for name, value in self._values.items() if _contents(value) != self._before[name]]
        if not changed:
            if "during iteration" not in str(error) and "Guard failed on the same frame" not in str(error):
                return None
            changed = list(self._values)  # one was changed, and changed back
        names = ", ".join(f"{name!r} ({type(self._values[name]).__name__})" for name in changed)
        return ArgumentChangedError(
            f"another thread changed {f'argument {names}' if names else 'a container'} while {function} was being compiled "
            "with it: pass a copy that no other thread changes, or let both threads take a lock of yours."
        )


def _can_change(value: Any) -> bool:
    return isinstance(value, (dict, list, set, deque, tuple))


def _contents(container: Any) -> Any:
    """Return what a container and those in it hold, by identity."""
    found: list[Any] = []
    seen: set[int] = set()
    todo = [container]
    try:
        while todo and len(found) < MOST_VALUES:
            one = todo.pop()
            if not _can_change(one) or id(one) in seen:
                continue
            seen.add(id(one))
            parts = [part for item in one.items() for part in item] if isinstance(one, dict) else list(one)
            found.append([id(part) for part in parts])
            todo.extend(parts)
    except RuntimeError:  # changed while it was looked at
        return object()
    return found
