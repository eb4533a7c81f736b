"""``torch.export``: the model that is exported stays usable in other threads."""

from __future__ import annotations

import builtins
import copy
import functools
import math
import threading
import warnings
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, cast

import torch

from safecompile._patches.fx import FXPatches
from safecompile._patches.generators import tensors_in
from safecompile._patches.per_call_settings import CallSettings
from safecompile._patches.point import PatchPoint
from safecompile._patches.rewriting import copy_of

# Taken before any export can have replaced them.
_MAX, _MIN = max, min


class Exports(PatchPoint):
    name = "exports"
    protects = (
        "a model that is exported has fake parameters for other threads, strict exports look at each other's values for "
        "their guards, and fail where they meet in an operator (E3); a strict export frees what compiled calls of the same code use (C2)"
    )
    relies_on = ("torch.export._trace:_export",)
    upstream = (
        "torch/export/_trace.py, _non_strict_export; torch/_guards.py, ChainedSource.get_value; torch/_ops.py; "
        "torch/_dynamo/eval_frame.py, export and remove_from_cache"
    )

    def __init__(self, fx: FXPatches, settings: CallSettings) -> None:
        super().__init__()
        self._fx, self._settings = fx, settings

    def apply(self) -> None:
        import torch.export._trace
        from torch._dynamo import guards

        self.wrap(torch.export._trace, "_export", self._export)
        self.wrap(torch._dynamo, "export", self._export_with_dynamo)
        # From torch 2.11 on, what is looked up for a guard stands in this dictionary meanwhile.
        self.wrap(guards, "_get_closure_vars", lambda get, *_: dict(get()))
        self.wrap(torch._ops.OpOverload, "_get_dispatch", self._kernel)
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

    def _kernel(self, get: Callable[[Any], Any], operator: Any, args: Any, _: Any) -> Any:
        """Return what stands for an operator under a dispatch key; torch asserts that no other trace has found it."""
        try:
            return get(*args)
        except AssertionError:
            if args[0] not in operator._dispatch_cache:
                raise
            return operator._dispatch_cache[args[0]]

    def _export(self, export: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        """Export a copy of the model's modules, with the same tensors: export puts fake ones in their place."""

        def copied(mod: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            return export(_copy_of(mod) if threading.active_count() > 1 else mod, *args, **kwargs)

        with self._settings.kept_to_this_thread():
            return copied(*args, **kwargs)

    def _export_with_dynamo(self, export: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        """Export a function with code of its own: what Dynamo keeps of that code is freed before and after."""

        def owning(f: Any, *args: Any, **kwargs: Any) -> Any:
            return export(_with_code_of_its_own(f) if threading.active_count() > 1 else f, *args, **kwargs)

        return owning(*args, **kwargs)


def _with_code_of_its_own(function: Any) -> Any:
    """Return a copy of a function, a bound method, or a module around the same parameters and submodules."""
    if isinstance(function, FunctionType):
        function = copy_of(function)
        function.__code__ = function.__code__.replace()
    elif isinstance(function, MethodType):
        function = MethodType(_with_code_of_its_own(function.__func__), function.__self__)
    elif isinstance(function, torch.nn.Module) and isinstance(function.forward, MethodType):
        forward, cls = _with_code_of_its_own(function.forward.__func__), cast("Any", type(function))
        function = copy.copy(function)
        if "forward" in vars(function):
            function.forward = MethodType(forward, function)
        else:  # in a class: torch 2.8 and older names the parameters of a module that has a forward itself differently
            body = {"forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
            function.__class__ = type(cls)(cls.__name__, (torch.nn.Module,), body)
            function.__class__.__bases__ = (cls,)  # afterwards: one that registers its subclasses must not see it
    return function


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
