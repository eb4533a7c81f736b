"""What follows a graph break: compiled once, too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch

from safecompile._core.gate import Gate, LookAgain
from safecompile._patches.point import PatchPoint


def skip_frames_of(code: CodeType) -> None:
    """Make Dynamo run frames of ``code`` as they are (but still look at what they call)."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(code)


class ResumeFunctions(PatchPoint):
    name = "resume-functions"
    protects = "what follows a graph break is compiled by every thread that gets there (E4)"
    upstream = "torch/_dynamo/output_graph.py, install_global_unsafe"
    relies_on = ("torch._dynamo.output_graph:OutputGraph.install_global_unsafe",)

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self._gate = gate

    def apply(self) -> None:
        from torch._dynamo.codegen import PyCodegen
        from torch._dynamo.output_graph import OutputGraph

        for code in (RESUME_CODE, _resumable.__code__, _resumable_from.__code__, _callback_getter.__code__):
            skip_frames_of(code)
        self.wrap(OutputGraph, "install_global_unsafe", self._install_global)
        self.wrap(PyCodegen, "make_function_with_closure", self._make_function)

    def _install_global(self, install: Callable[..., None], _: Any, args: Any, kwargs: Any) -> None:
        def wrapped(name: str, value: Any) -> None:
            if name.startswith("__resume_at_") and not isinstance(value, CodeType):  # code: _make_function
                if value.__name__ == name:
                    value = _resumable(self._gate, value)
                else:  # resume functions with free variables are made by a factory at run time
                    value = functools.partial(_resumable_from, self._gate, value)
            install(name, value)

        wrapped(*args, **kwargs)

    def _make_function(self, make: Callable[..., None], codegen: Any, args: Any, kwargs: Any) -> None:
        """Wrap what torch before 2.12 makes in the frame itself from code with free variables, and has no factory for."""
        from torch._dynamo.bytecode_transformation import create_call_function, create_load_const, create_swap

        make(*args, **kwargs)
        output, wrapper = codegen.get_instructions(), functools.partial(_resumable, self._gate)
        made = max(i for i, made in enumerate(output) if made.opname in {"MAKE_FUNCTION", "SET_FUNCTION_ATTRIBUTE"})
        load = create_load_const(wrapper, checked=False)
        output[made + 1 : made + 1] = [load, *create_swap(2), *create_call_function(1, push_null=True)]


def _resumable(gate: Gate, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a resume function so that it can be called again: none of it has run when Dynamo calls back."""

    def resume(*args: Any, **kwargs: Any) -> Any:
        callback, tries = get_callback(), 0
        while True:
            seen = gate.epoch  # noqa: F841  the gate reads it, and tries, from this frame
            try:
                return function(*args, **kwargs)
            except LookAgain:
                tries += 1
                # Dynamo switches itself off for the thread when its callback raises.
                set_eval_frame(callback)

    from torch._C._dynamo.eval_frame import set_eval_frame

    get_callback = _callback_getter()

    # The rest of an outer function may be traced together with an inner one's: then without this wrapper.
    resume._torchdynamo_inline = function  # type: ignore[attr-defined]
    return resume


def _callback_getter() -> Callable[[], Any]:
    """Return what tells which callback Dynamo has in the calling thread."""
    from torch._C._dynamo.eval_frame import get_eval_frame_callback, set_eval_frame

    if not torch.__version__.startswith("2.6."):
        return get_eval_frame_callback

    def taken_and_put_back() -> Any:  # the other function returns a reference that it does not count
        callback = set_eval_frame(None)
        set_eval_frame(callback)
        return callback

    skip_frames_of(taken_and_put_back.__code__)
    return taken_and_put_back


def _resumable_from(gate: Gate, factory: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    return _resumable(gate, factory(*args))


RESUME_CODE = next(
    constant for constant in _resumable.__code__.co_consts if getattr(constant, "co_name", "") == "resume"
)
