"""``torch.export``: the model that is exported stays usable in other threads."""

from __future__ import annotations

import builtins
import copy
import functools
import math
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from safecompile._patches.fx import FXPatches
from safecompile._patches.generators import tensors_in
from safecompile._patches.point import PatchPoint

__all__ = ["Exports"]

# Taken before any export can have replaced them.
_MAX, _MIN = max, min


class Exports(PatchPoint):
    name = "exports"
    protects = "a model that is exported has fake parameters for other threads; a strict export resets Dynamo (E3)"
    upstream = "torch/export/_trace.py, _non_strict_export"

    def __init__(self, fx: FXPatches) -> None:
        super().__init__()
        self._fx = fx

    def mismatch(self) -> str | None:
        import torch.export._trace

        return None if hasattr(torch.export._trace, "_export") else "torch.export._trace has no _export"

    def apply(self) -> None:
        import torch.export._trace

        self.wrap(torch.export._trace, "_export", self._export)
        if hasattr(torch.export._trace, "_override_builtin_ops"):
            self.wrap(torch.export._trace, "_override_builtin_ops", self._override_builtins)

    def _override_builtins(self, override: Any, _: Any, args: Any, kwargs: Any) -> Any:
        """Replace ``max``, ``min`` and ``math.pow`` for one export, so that overlapping ones leave nothing behind."""
        from torch._export.non_strict_utils import _tensor_min_max

        biggest = functools.partial(_tensor_min_max, real_callable=_MAX, tensor_callable=torch.maximum)
        smallest = functools.partial(_tensor_min_max, real_callable=_MIN, tensor_callable=torch.minimum)
        return self._fx.replaced(
            [
                (vars(builtins), "max", biggest),
                (vars(builtins), "min", smallest),
                (vars(math), "pow", lambda x, y: x**y),
            ]
        )

    def _export(self, export: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        """Export a copy of the model's modules, with the same tensors: export puts fake ones in their place."""

        def copied(mod: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            return export(_copy_of(mod) if threading.active_count() > 1 else mod, *args, **kwargs)

        return copied(*args, **kwargs)


def _copy_of(model: torch.nn.Module) -> torch.nn.Module:
    shared = [*model.parameters(), *model.buffers()]
    shared += [tensor for module in model.modules() for tensor in tensors_in(list(vars(module).values()))]
    try:
        return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    except Exception as error:
        warnings.warn(
            f"{type(model).__name__} is exported in place, because it cannot be copied ({error!r}): let no other thread "
            "call it until the export has ended.",
            RuntimeWarning,
            stacklevel=2,
        )
        return model
