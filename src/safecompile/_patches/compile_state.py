"""What a compile puts back when it ends: random numbers and settings that belong to the whole process."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from safecompile._patches.company import alone
from safecompile._patches.point import PatchPoint
from safecompile._patches.rewriting import (
    Instead,
    codes_in,
    constant,
    copy_of,
    functions_of,
    parsed,
    redirecting,
    rewritten,
    with_constants,
)


class CompileState(PatchPoint):
    """Lets a compile put back generators and settings only if no other thread can have changed them meanwhile."""

    name = "compile-state"
    protects = (
        "numbers that other threads draw during a compile are drawn again (S2); settings that they make are undone, or "
        '"state changed while dynamo tracing" (S3)'
    )
    upstream = "torch/_dynamo/convert_frame.py, preserve_global_state; torch/_dynamo/utils.py, preserve_rng_state"
    relies_on = ("torch._dynamo.convert_frame:preserve_global_state", "torch._dynamo.utils:preserve_rng_state")
    old_code_may_run = True

    def __init__(self) -> None:
        super().__init__()
        self._python = threading.local()

    def apply(self) -> None:
        from torch._dynamo import convert_frame, output_graph, utils

        # A reset empties it, also while a backward is timed.
        times = defaultdict(list, utils.compilation_time_metrics)
        for module in (utils, output_graph):
            if hasattr(module, "compilation_time_metrics"):
                self.replace(module, "compilation_time_metrics", times)
        changed = rewritten(convert_frame, ["def preserve_global_state"], _OnlyAlone())
        (code,) = [c for c in codes_in(convert_frame.preserve_global_state.__code__) if c.co_name == "_fn"]
        new = with_constants(changed(code), alone=alone)
        for function in functions_of(convert_frame):
            if function.__code__ is code:
                self.recode(function, new)
        # Older torch decorates when it compiles.
        make: Any = convert_frame.preserve_global_state
        self.recode(make, with_constants(changed(make.__code__), alone=alone))
        preserve: Any = inspect.unwrap(utils.preserve_rng_state)
        original = copy_of(preserve)
        self.recode(preserve, redirecting(lambda: _preserved(original), generator=True))
        if "setstate" in code.co_names:
            return  # torch 2.11 and older; Dynamo's C++ code calls these around its callback in newer torch
        self.wrap(random, "getstate", self._get_state)
        self.wrap(random, "setstate", self._set_state)
        self.wrap(convert_frame.CatchErrorsWrapper, "__call__", self._call_back)

    def _get_state(self, get: Callable[[], Any], _: Any, args: Any, kwargs: Any) -> Any:
        self._python.last = get(*args, **kwargs)
        return self._python.last

    def _call_back(self, call_back: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        if not alone():
            self._python.keep = getattr(self._python, "last", None)
        return call_back(*args, **kwargs)

    def _set_state(self, set_: Callable[..., None], _: Any, args: Any, kwargs: Any) -> None:
        if args and args[0] is getattr(self._python, "keep", None):
            self._python.keep = None
        else:
            set_(*args, **kwargs)


def _preserved(preserve: Callable[[], Iterator[None]]) -> Iterator[None]:
    if alone():
        yield from preserve()
    else:
        yield


class _OnlyAlone(ast.NodeTransformer):
    """Puts what restores the process's state at the end of a compile, and the check of it, under a condition."""

    _restores = frozenset(
        {
            "set_rng_state",
            "setstate",
            "use_deterministic_algorithms",
            "set_default_dtype",
            "_set_fp32_precision_setter",
            "_set_cublas_allow_tf32",
        }
    )

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        if node.name == "_fn":
            node.body[:0] = parsed(f"alone_at_the_start = {constant('alone')!r}.__call__()", node)
        return node

    def _if_alone(self, node: ast.stmt) -> ast.stmt:
        (condition,) = parsed(f"if alone_at_the_start and {constant('alone')!r}.__call__(): pass", node)
        condition.body = [node]  # type: ignore[attr-defined]
        return condition

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        function = node.value.func if isinstance(node.value, ast.Call) else None
        return self._if_alone(node) if getattr(function, "attr", "") in self._restores else node

    def visit_If(self, node: ast.If) -> ast.stmt:
        self.generic_visit(node)
        return self._if_alone(node) if "guards.check()" in ast.unparse(node.test) else node

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        return self._if_alone(node) if "guards.check()" in ast.unparse(node.test) else node


class AnomalyMode(PatchPoint):
    name = "anomaly-mode"
    protects = (
        "other threads' autograd keeps stacks, and can deadlock, while a compile is in anomaly mode, which is the "
        "process's; what they set meanwhile is undone (S3, D1)"
    )
    upstream = "torch/_functorch/_aot_autograd/graph_capture_wrappers.py, detect_anomaly"
    old_code_may_run = True

    def apply(self) -> None:
        package = "torch._functorch._aot_autograd"
        newer = importlib.util.find_spec(f"{package}.graph_capture_wrappers")  # than torch 2.8
        module = importlib.import_module(newer.name if newer else f"{package}.traced_function_transforms")
        changed = rewritten(module, ["detect_anomaly"], Instead("torch.autograd.detect_anomaly", "mode"))
        for function in functions_of(module):
            if any("detect_anomaly" in code.co_names for code in codes_in(function.__code__)):
                self.recode(function, with_constants(changed(function.__code__), mode=_Mode()))


class _Mode:
    def detect_anomaly(self, check_nan: bool) -> Any:
        """Note the stack of each backward node, which the compile shows in errors, if no other thread would do so."""
        if alone() or torch.is_anomaly_enabled():  # the user's mode checks for nan, which the trace must not
            return torch.autograd.detect_anomaly(check_nan)
        return contextlib.nullcontext()
