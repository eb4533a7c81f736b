"""The compiler's configuration, which from torch 2.12 on each thread has for itself."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["apply_config", "capture_config"]

_MODULES = ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config")


def capture_config() -> dict[str, dict[str, Any]]:
    """Return the calling thread's values, by module. Modules that nothing has imported hold their defaults."""
    return {name: sys.modules[name].get_config_copy() for name in _MODULES if name in sys.modules}


def apply_config(captured: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Set what differs on the calling thread; return what it had, in the same form."""
    before: dict[str, dict[str, Any]] = {}
    for name, values in captured.items():
        module: Any = sys.modules[name]
        mine = module.get_config_copy()
        for key, value in values.items():
            if key in mine and mine[key] != value:
                before.setdefault(name, {})[key] = mine[key]
                setattr(module, key, value)
    return before
