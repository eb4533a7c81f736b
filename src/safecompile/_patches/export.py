"""``torch.export``: the model that is exported stays usable in other threads."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from safecompile._patches.point import PatchPoint
from safecompile._patches.random_numbers import tensors_in

__all__ = ["ExportCopies"]


class ExportCopies(PatchPoint):
    name = "export-copies"
    protects = "a model called or exported by another thread while it is exported has fake parameters"
    upstream = "torch/export/_trace.py, _non_strict_export"

    def mismatch(self) -> str | None:
        import torch.export._trace

        return None if hasattr(torch.export._trace, "_export") else "torch.export._trace has no _export"

    def apply(self) -> None:
        import torch.export._trace

        self.wrap(torch.export._trace, "_export", self._export)

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
