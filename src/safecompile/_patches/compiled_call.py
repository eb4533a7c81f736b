"""The function that ``torch.compile`` returns, changed so that a call can be sent back to Dynamo's cache.

``LookAgain`` is caught in torch's own wrapper around a compiled call: no frame is added to a warm call, and no
code of the user's stands between the one that raises and the one that calls again.
"""

from __future__ import annotations

import ast
import gc
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Protocol

import torch

from safecompile._core import events
from safecompile._core.gate import Gate, LookAgain
from safecompile._core.guarded import Guarded
from safecompile._core.stacks import outwards
from safecompile._patches.point import PatchPoint
from safecompile._patches.resume_functions import skip_frames_of
from safecompile._patches.rewriting import Instead, codes_in, constant, parsed, rewritten, with_constants


class _Installs(Protocol):
    def install(self) -> int: ...
    def wait_for_reset(self) -> int: ...


class _Waits:
    """What the calls of others do: they install nothing, but do not begin while Dynamo is reset."""

    def __init__(self, patches: _Installs) -> None:
        self.install = patches.wait_for_reset


# On the object of torch's that a compiled function belongs to: its Guarded, and what counts its calls.
_GUARDED, _CALLS = "_safecompile_guarded", "_safecompile_calls"


class CompiledCalls(PatchPoint):
    name = "compiled-calls"
    protects = "N threads that make one first call compile it up to N times (E4)"
    upstream = "pytorch#123177; torch/_dynamo/eval_frame.py, _TorchDynamoContext.__call__"
    old_code_may_run = True

    def __init__(self, gate: Gate, patches: _Installs) -> None:
        """A guarded callable installs ``patches`` when it is called."""
        super().__init__()
        self._gate, self._patches = gate, patches
        # By torch's code: what guarded callables run, and what all others do while the patches are installed.
        self._guarded: dict[CodeType, CodeType] = {}
        self._plain: dict[CodeType, CodeType] = {}
        # Around what Dynamo leaves alone: several of them stand in the way of a warm call.
        self._disabled: dict[CodeType, CodeType] = {}
        self.codes: set[CodeType] = set()

    def mismatch(self) -> str | None:
        self._prepare()
        return None if self.codes else "torch.compile does not return a function that can be made to call again"

    def apply(self) -> None:
        from torch._dynamo import eval_frame

        self._prepare()
        makers: list[Any] = [eval_frame._TorchDynamoContext.__call__, eval_frame.DisableContext.__call__]
        for make, new in zip(makers, (self._plain, self._disabled), strict=True):
            for code in new:
                for function in gc.get_referrers(code):
                    if type(function) is FunctionType and function.__code__ is code:
                        self.recode(function, new[code])
            consts = tuple(new.get(const, const) for const in make.__code__.co_consts)
            self.recode(make, make.__code__.replace(co_consts=consts))

    def guard(self, compiled: Any, guarded: Guarded) -> bool:
        """Make a function that ``torch.compile`` has returned install the patches when it is called."""
        self._prepare()
        code = self._guarded.get(compiled.__code__)
        if code is not None:
            compiled.__code__ = code
            context = compiled.__closure__[code.co_freevars.index("self")].cell_contents
            vars(context).update({_GUARDED: guarded, _CALLS: guarded.calls})
        return code is not None

    def call_in(self, frame: FrameType) -> FrameType | None:
        """Return the frame of torch's wrapper around the innermost guarded call, seen from ``frame``."""
        return next((one for one in outwards(frame) if self.catch(one.f_code) and self.record(one)), None)

    def record(self, call: FrameType | None) -> Guarded | None:
        """Return what a frame of torch's wrapper calls, if it is a guarded callable."""
        return vars(call.f_locals["self"]).get(_GUARDED) if call is not None else None

    def guarded_in(self, frame: FrameType) -> Guarded | None:
        """Return the innermost guarded callable that is being called, seen from ``frame``."""
        return self.record(self.call_in(frame))

    def catch(self, code: CodeType) -> bool:
        """Tell whether ``code`` catches ``LookAgain``; its locals are ``seen``, the epoch, and ``tries``."""
        return any(code is one for one in self.codes)  # Dynamo's code may hold constants that have no hash

    def _prepare(self) -> None:
        from torch._dynamo import eval_frame

        if self.codes:
            return
        constants = {"gate": self._gate, "look_again": LookAgain, "compiler": _compiler, "told": _Told()}
        changed = rewritten(
            eval_frame,
            ["class _TorchDynamoContext", "class DisableContext"],
            _CallAgain("torch.compiler.is_exporting", "compiler"),
        )
        for code in codes_in(eval_frame._TorchDynamoContext.__call__.__code__):
            if code.co_name in _CallAgain.names and changed(code).co_freevars == code.co_freevars:
                self._guarded[code] = with_constants(
                    changed(code), patches=self._patches, calls=events.calls, **constants
                )
                self._plain[code] = with_constants(
                    changed(code), patches=_Waits(self._patches), calls=events.Calls(counted=False), **constants
                )
        for code in codes_in(eval_frame.DisableContext.__call__.__code__):
            if code.co_name in _CallAgain.names:
                self._disabled[code] = with_constants(changed(code), **constants)
        self._guarded.update({plain: self._guarded[code] for code, plain in self._plain.items()})
        self.codes.update(self._guarded.values(), self._plain.values())


class _Told:
    """Whom a call tells that it has ended."""

    def __init__(self) -> None:
        from torch._C._dynamo.eval_frame import set_eval_frame

        self._set_eval_frame = set_eval_frame
        skip_frames_of(_Told.ended.__code__)

    def ended(self, context: Any, began: float) -> None:
        # A part of an outer call that runs as it is has Dynamo switched on: it would compile the subscribers.
        callback = self._set_eval_frame(None)
        try:
            events.calls.ended(vars(context)[_GUARDED], began)
        finally:
            self._set_eval_frame(callback)


# What is called of torch.compiler, whose names are slow to look up while it has properties; a module's are the fastest.
_compiler: Any = ModuleType("compiler")
_compiler.is_exporting = getattr(torch.compiler, "is_exporting", bool)  # not in torch 2.6


class _CallAgain(Instead, ast.NodeTransformer):
    """Puts a loop around the body of the wrapper."""

    names = ("compile_wrapper", "_fn")  # in newer and in older torch
    loop = f"""
tries = 0
{constant("calls")!r}.counted and next(self.{_CALLS})
began = {constant("calls")!r}.wanted and {constant("calls")!r}.clock()
try:
    while True:
        # Noted before Dynamo looks in its cache; the gate reads it from this frame, so that a warm call takes no lock,
        # and writes nothing but the count of calls.
        seen = {constant("gate")!r}.epoch or {constant("patches")!r}.install()
        try:
            pass
        except {constant("look_again")!r}:  # nothing of the function has run; another thread has compiled it
            tries += 1
finally:
    if began:
        {constant("told")!r}.ended(self, began)
"""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        self._compiles = node.name == "_TorchDynamoContext"
        self.generic_visit(node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        if self._compiles and node.name in self.names:
            loop: Any = parsed(self.loop, node)
            loop[-1].body[0].body[1].body = node.body
            node.body = loop
        return node
