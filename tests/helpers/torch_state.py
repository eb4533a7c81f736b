"""Whether torch is still what it was: every attribute of its modules and classes, and every function's code."""

from __future__ import annotations

import gc
import inspect
import sys
from types import FunctionType, ModuleType
from typing import Any

# Replaced by Python itself while code runs, or a cache that the first use fills.
_IGNORED = {"__builtins__", "__cached__", "__abstractmethods__", "_abc_impl", "__warningregistry__"}

_MISSING = object()


def snapshot() -> dict[tuple[str, str], Any]:
    """Return what every attribute of torch's imported modules, and of the classes defined in them, is at present."""
    gc.collect()  # Dynamo counts what it does when compiled code is freed (CleanupManager.count)
    state: dict[tuple[str, str], Any] = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] != "torch" or not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            _put(state, module_name, name, value)
            if inspect.isclass(value) and value.__module__ == module_name:
                for attribute, member in list(vars(value).items()):
                    _put(state, f"{module_name}.{value.__qualname__}", attribute, member)
    return state


def changes(before: dict[tuple[str, str], Any], after: dict[tuple[str, str], Any]) -> list[str]:
    """Return the names of what was changed, removed or added between two snapshots.

    Modules imported meanwhile, and all that is in them, are no change.
    """
    owners = {owner for owner, _ in before}
    changed = []
    for owner, name in sorted(before.keys() | after.keys()):
        if owner not in owners or name in _IGNORED:
            continue
        old, new = before.get((owner, name), _MISSING), after.get((owner, name), _MISSING)
        if old is not new and not (old is _MISSING and isinstance(new, ModuleType)):
            changed.append(f"{owner}.{name}")
    return changed


def _put(state: dict[tuple[str, str], Any], owner: str, name: str, value: Any) -> None:
    state[owner, name] = value
    function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
    if isinstance(function, FunctionType):
        state[owner, f"{name}.__code__"] = function.__code__  # a patch can keep the function and replace its code
