"""What AOTAutograd compiles by itself, under the lock: backwards, once, and graphs that are given to it directly."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from safecompile._core.lock import FXTraceLock
from safecompile._patches.point import PatchPoint
from safecompile._patches.rewriting import copy_of, redirecting

__all__ = ["DirectCompiles", "LazyBackward"]


class LazyBackward(PatchPoint):
    name = "lazy-backward"
    protects = "threads whose first backwards meet compile the same backward several times (E4, E5)"
    upstream = "torch/_functorch/_aot_autograd/runtime_wrappers.py; pytorch#170605"

    def __init__(self, lock: FXTraceLock) -> None:
        super().__init__()
        self._lock = lock

    def mismatch(self) -> str | None:
        from torch._functorch._aot_autograd import runtime_wrappers

        names = ("_AutogradBackwardCompiler", "AOTDispatchAutograd")
        return None if any(hasattr(runtime_wrappers, name) for name in names) else f"AOTAutograd has none of {names}"

    def apply(self) -> None:
        from torch._functorch._aot_autograd import runtime_wrappers

        if hasattr(runtime_wrappers, "_AutogradBackwardCompiler"):
            self.wrap(runtime_wrappers._AutogradBackwardCompiler, "get_or_compile", self._get_or_compile)
        else:  # torch 2.12 and older
            self.wrap(runtime_wrappers.AOTDispatchAutograd, "post_compile", self._post_compile)

    def _get_or_compile(self, compile_it: Callable[..., Any], compiler: Any, args: Any, kwargs: Any) -> Any:
        if compiler.compiled_bw is not None:
            return compiler.compiled_bw
        # Only the compile is under the lock, not the backward; torch looks again under it.
        with self._lock, self._lock.doing("compiling a backward"):
            return compile_it(*args, **kwargs)

    def _post_compile(self, post_compile: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        """Give the function that is being made a backward compiler that compiles once; torch does not look again."""

        def once(value: Any) -> Any:
            if getattr(value, "bw_compiler", None) is None:
                return value
            done: list[Any] = []

            def compile_once(*args: Any, **kwargs: Any) -> Any:
                with self._lock, self._lock.doing("compiling a backward"):
                    if not done:
                        done.append(value.bw_compiler(*args, **kwargs))
                    return done[0]

            return dataclasses.replace(value, bw_compiler=compile_once)

        return post_compile(*map(once, args), **{name: once(value) for name, value in kwargs.items()})


class DirectCompiles(PatchPoint):
    name = "direct-compiles"
    protects = (
        '"Duplicate pattern" and other errors of graphs that threads give to AOTAutograd or Inductor directly (E3)'
    )
    upstream = "torch/_functorch/aot_autograd.py, aot_module_simplified; torch/_inductor/compile_fx.py"

    def __init__(self, lock: FXTraceLock) -> None:
        super().__init__()
        self._lock = lock

    def mismatch(self) -> str | None:
        from torch._functorch import aot_autograd

        has = hasattr(aot_autograd, "aot_module_simplified")
        return None if has else "torch._functorch.aot_autograd has no aot_module_simplified"

    def apply(self) -> None:
        from torch._functorch import aot_autograd

        compile_graph: Any = aot_autograd.aot_module_simplified
        original = copy_of(compile_graph)

        def compile_alone(*args: Any, **kwargs: Any) -> Any:
            if self._lock.work() is not None:  # by way of Dynamo
                return original(*args, **kwargs)
            with self._lock, self._lock.doing("compiling a graph"):
                return original(*args, **kwargs)

        self.recode(compile_graph, redirecting(compile_alone))
