"""The compiler's configuration, which from torch 2.12 on each thread has for itself, in a ContextVar for each value."""

from __future__ import annotations

import contextvars
import copy
import sys
from collections.abc import Callable
from typing import Any

from torch.utils import _config_module

from safecompile._patches.point import PatchPoint

_MODULES = ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config")

_UNSET = getattr(_config_module, "_UNSET_SENTINEL", None)

_Variable = contextvars.ContextVar[Any]
ConfigValues = dict[_Variable, Any]

# What each variable is: its module and name there, and the value where nothing is set.
_variables: dict[_Variable, tuple[Any, str, Any]] = {}
_seen: set[str] = set()


def capture_config(context: contextvars.Context | None = None) -> ConfigValues:
    """Return what is set in a context, by default the calling thread's, to other than a new thread's values.

    Before torch 2.12 that is nothing: the values are the process's own.
    """
    _look_for_variables()
    return {
        variable: copy.copy(value) if isinstance(value, (dict, list, set)) else value
        for variable, value in (context or contextvars.copy_context()).items()
        # Many are set to what holds anyway, by a compile that has put them back, or by reading them.
        if variable in _variables and value is not _UNSET and value != _variables[variable][2]
    }


def apply_config(values: ConfigValues) -> Callable[[], None]:
    """Set these values, and unset all others, on the calling thread; return what undoes it."""
    mine, changes = capture_config(), dict[Any, dict[str, Any]]()
    for variable in {**values, **mine}:
        value = values.get(variable, _UNSET)
        if value != mine.get(variable, _UNSET):
            module, name, _ = _variables[variable]
            changes.setdefault(module, {})[name] = value
    reverts = [module._make_closure_patcher(**change)() for module, change in changes.items()]

    def undo() -> None:
        for revert in reverts:
            revert()

    return undo


def _look_for_variables() -> None:
    for name in _MODULES:
        module: Any = sys.modules.get(name)
        entries = (
            getattr(module, "_config", {}) if name not in _seen and hasattr(module, "_make_closure_patcher") else {}
        )
        for key, entry in entries.items():
            variable, in_environment = entry.user_override, entry.env_value_default
            if isinstance(variable, contextvars.ContextVar):
                _variables[variable] = module, key, entry.default if in_environment is _UNSET else in_environment
        if entries:
            _seen.add(name)


class ConfigCaches(PatchPoint):
    name = "config-caches"
    protects = (
        '"Set changed size during iteration" in a compile, while another thread of asyncio.to_thread, of anyio or of a '
        "backward sets a value: copies of a context share the set of changed values"
    )
    upstream = "torch/utils/_config_module.py, _mark_get_dict_dirty"

    def mismatch(self) -> str | None:
        names = {"_get_dict_dirty_keys_var", "_get_dict_cache_var"}
        known = names <= _config_module.ConfigModule.__annotations__.keys()
        return None if known else f"torch's configuration has none of {sorted(names)}"

    def needed(self) -> bool:
        return hasattr(_config_module.ConfigModule, "_mark_get_dict_dirty")  # torch 2.12 and newer

    def apply(self) -> None:
        self.wrap(_config_module.ConfigModule, "_mark_get_dict_dirty", self._mark)

    def _mark(self, mark: Callable[..., None], module: Any, args: Any, kwargs: Any) -> None:
        changed, cached = module._get_dict_dirty_keys_var.get(), module._get_dict_cache_var.get()
        if changed is not None:
            # Both, for what is cached is right together with what has changed since.
            module._get_dict_dirty_keys_var.set(set(changed))
            module._get_dict_cache_var.set(dict(cached or {}))
        mark(*args, **kwargs)
