"""Arguments that another thread changes while Dynamo looks at them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

from safecompile._core.errors import ArgumentChangedError
from safecompile._patches.company import alone

# How many values are remembered; what is in bigger containers counts as unchanged.
MOST_VALUES = 10_000


class Arguments:
    """The containers that a frame has a name for, as they were before Dynamo looked at them."""

    def __init__(self, frame: Any) -> None:
        self._values = {} if alone() else {name: value for name, value in _named(frame) if _can_change(value)}
        self._before = {name: _contents(value) for name, value in self._values.items()}

    def blame(self, error: Exception, function: str) -> ArgumentChangedError | None:
        """Return the error to raise in the place of an internal one that their change has caused (E8; pytorch#196208)."""
        from torch._dynamo.exc import InternalTorchDynamoError, TorchDynamoException

        if alone() or (isinstance(error, TorchDynamoException) and not isinstance(error, InternalTorchDynamoError)):
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


def _named(frame: Any) -> Iterator[tuple[str, Any]]:
    """Return the locals, the globals that are used, and the attributes of both that are used, by their names."""
    used = frame.f_code.co_names
    for name, value in [*frame.f_locals.items(), *((n, frame.f_globals[n]) for n in used if n in frame.f_globals)]:
        yield name, value
        with contextlib.suppress(AttributeError):
            attributes = object.__getattribute__(value, "__dict__")  # calls nothing of the user's
            yield from ((f"{name}.{attribute}", attributes[attribute]) for attribute in used if attribute in attributes)


_CONTAINERS = (dict, list, set, deque, tuple)


def _can_change(value: Any) -> bool:
    return isinstance(value, _CONTAINERS)


def _contents(container: Any) -> Any:
    """Return what a container and those in it hold, by identity, without calling a method of the user's."""
    found: list[Any] = []
    seen: set[int] = set()
    todo = [container]
    size = 0
    try:
        while todo:
            one = todo.pop()
            if not _can_change(one) or id(one) in seen:
                continue
            kind: Any = next(kind for kind in _CONTAINERS if isinstance(one, kind))
            seen.add(id(one))
            size += kind.__len__(one)
            if size > MOST_VALUES:
                break
            parts = [part for item in dict.items(one) for part in item] if kind is dict else list(kind.__iter__(one))
            found.append([id(part) for part in parts])
            todo.extend(parts)
    except RuntimeError:  # changed while it was looked at
        return object()
    return found
