"""What AOTAutograd compiles by itself, under the lock: backwards, once, and graphs that are given to it directly."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import safecompile
from safecompile._core.events import Compile, current, watched
from safecompile._core.guarded import Guarded
from safecompile._core.lock import FXTraceLock
from safecompile._core.stacks import outwards
from safecompile._patches.config import apply_config, capture_config
from safecompile._patches.point import PatchPoint
from safecompile._patches.rewriting import copy_of, redirecting

_FORWARD = "safecompile_forward"


class LazyBackward(PatchPoint):
    name = "lazy-backward"
    protects = (
        "threads whose first backwards meet compile the same backward several times (E4, E5); a backward on another "
        "thread than its forward's is compiled with other configuration (S10)"
    )
    upstream = "torch/_functorch/_aot_autograd/runtime_wrappers.py; pytorch#170605"

    def __init__(self, lock: FXTraceLock) -> None:
        super().__init__()
        self._lock = lock

    def mismatch(self) -> str | None:
        from torch._functorch._aot_autograd import runtime_wrappers

        names = ("_AutogradBackwardCompiler", "AOTDispatchAutograd")
        return None if any(hasattr(runtime_wrappers, name) for name in names) else f"AOTAutograd has none of {names}"

    def apply(self) -> None:
        from torch._dynamo import utils
        from torch._dynamo.callback import callback_handler
        from torch._functorch._aot_autograd import runtime_wrappers

        if hasattr(runtime_wrappers, "_AutogradBackwardCompiler"):
            self.wrap(runtime_wrappers._AutogradBackwardCompiler, "__init__", self._note_forward)
            self.wrap(runtime_wrappers._AutogradBackwardCompiler, "get_or_compile", self._get_or_compile)
        else:  # torch 2.12 and older
            self.wrap(runtime_wrappers.AOTDispatchAutograd, "post_compile", self._post_compile)
            # In torch 2.8 and older, what it measures begins before its compile, and so before it has the lock.
            metrics: Any = vars(utils).get("_METRICS_CONTEXT")
            if metrics is not None:
                per_thread = type("MetricsPerThread", (type(metrics), threading.local), {})
                self.replace(utils, "_METRICS_CONTEXT", per_thread(on_exit=metrics._on_exit))
            # So does what it counts as a compile in flight; torch resets nothing while there is one.
            self.replace(type(callback_handler), "clear", _clear)

    def _get_or_compile(self, compile_it: Callable[..., Any], compiler: Any, args: Any, kwargs: Any) -> Any:
        if compiler.compiled_bw is not None:
            return compiler.compiled_bw
        # Only the compile is under the lock, not the backward.
        with self._lock, self._lock.doing("compiling a backward"):
            known = vars(compiler)
            if known["compiled_bw"] is not None:  # by another thread, meanwhile
                return known["compiled_bw"]
            return (known.get(_FORWARD) or _Forward()).backward(lambda: compile_it(*args, **kwargs))

    def _note_forward(self, init: Callable[..., None], compiler: Any, args: Any, kwargs: Any) -> None:
        init(*args, **kwargs)
        vars(compiler)[_FORWARD] = _Forward()

    def _post_compile(self, post_compile: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        """Give the function that is being made a backward compiler that compiles once; torch does not look again."""

        def once(value: Any) -> Any:
            if getattr(value, "bw_compiler", None) is None:
                return value
            done: list[Any] = []
            forward = _Forward()

            def compile_once(*args: Any, **kwargs: Any) -> Any:
                with self._lock, self._lock.doing("compiling a backward"):
                    if not done:
                        done.append(forward.backward(lambda: value.bw_compiler(*args, **kwargs)))
                    return done[0]

            return replace(value, bw_compiler=compile_once)

        return post_compile(*map(once, args), **{name: once(value) for name, value in kwargs.items()})


def _clear(callbacks: Any) -> None:
    callbacks.start_callbacks.clear()
    callbacks.end_callbacks.clear()


class _Forward:
    """What the calling thread compiles, and the configuration that it had when that began, kept for its backward.

    The callable is not kept: torch may keep a backward for ever.
    """

    def __init__(self) -> None:
        compile_, began = current() or (Compile("forward", "a graph", "<unknown>", 0), None)
        guarded = compile_.guarded
        self._guarded: Callable[[], Guarded | None] = weakref.ref(guarded) if guarded else lambda: None
        self._backward = replace(compile_, kind="backward", guarded=None)
        self._config = capture_config(began)

    def backward(self, work: Callable[[], Any]) -> Any:
        """Compile its backward, with its configuration, on whichever thread meets that first."""
        backward = replace(self._backward, guarded=self._guarded())
        put_back = apply_config(self._config)
        try:
            return watched(backward, work, reasons=lambda: ("first backward through its forward",))
        finally:
            put_back()


class DirectCompiles(PatchPoint):
    name = "direct-compiles"
    protects = (
        '"Duplicate pattern" and other errors of graphs that threads give to AOTAutograd or Inductor directly (E3)'
    )
    upstream = "torch/_functorch/aot_autograd.py, aot_module_simplified; torch/_inductor/compile_fx.py"
    relies_on = ("torch._functorch.aot_autograd:aot_module_simplified",)

    def __init__(self, lock: FXTraceLock) -> None:
        super().__init__()
        self._lock = lock

    def apply(self) -> None:
        from torch._functorch import aot_autograd

        compile_graph: Any = aot_autograd.aot_module_simplified
        original = copy_of(compile_graph)

        def compile_alone(*args: Any, **kwargs: Any) -> Any:
            if self._lock.work() is not None:  # by way of Dynamo
                return original(*args, **kwargs)
            with self._lock, self._lock.doing("compiling a graph"):
                return watched(
                    _given_by(outwards(sys._getframe(1))),
                    lambda: original(*args, **kwargs),
                    reasons=lambda: ("given to the compiler directly",),
                )

        self.recode(compile_graph, redirecting(compile_alone))


def _given_by(frames: Iterable[FrameType]) -> Compile:
    """Describe a graph by the function, not of torch, that gives it to a compiler."""
    ours = tuple(str(Path(file).parent) + os.sep for file in (torch.__file__, safecompile.__file__))
    frame = next(frame for frame in frames if not frame.f_code.co_filename.startswith(ours) or frame.f_back is None)
    return Compile("graph", frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno)
