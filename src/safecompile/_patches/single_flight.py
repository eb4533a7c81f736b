"""One compile for each graph, however many threads ask for it."""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, cast

import torch

from safecompile._core import events
from safecompile._core.errors import WaitCycleError
from safecompile._core.gate import Gate, LookAgain
from safecompile._core.lock import FXTraceLock
from safecompile._patches.arguments import Arguments
from safecompile._patches.cache_entries import entries, entry_in, has_entry, remember
from safecompile._patches.company import alone
from safecompile._patches.compiled_call import CompiledCalls
from safecompile._patches.interpreter_exit import InterpreterExit
from safecompile._patches.point import PatchPoint
from safecompile._patches.resume_functions import RESUME_CODE
from safecompile._patches.running_as_it_is import as_it_is, can_run_once_as_it_is, in_a_checkpoint, run_once_as_it_is

# A miss that is one only for Dynamo's lookup (a guard that another thread's settings flip) must not go on for ever.
MOST_TRIES = 100

# How many entries of Dynamo's cache are asked why they do not fit: that takes time, under the lock.
MOST_EXPLAINED = 32

_WAS_INSERTED = "safecompile_was_inserted"

# The references to an object of a list in a loop over it: the list's, the variable's and sys.getrefcount's own.
NOBODY_ELSE = 3


class SingleFlight(PatchPoint):
    name = "single-flight"
    protects = "N threads that make one first call compile it up to N times (E4)"
    upstream = "pytorch#123177; torch/_dynamo/convert_frame.py, CatchErrorsWrapper.__call__"
    relies_on = (
        "torch._dynamo.convert_frame:CatchErrorsWrapper",
        "torch._dynamo.convert_frame:ConvertFrameAssert",
        "torch._C._dynamo.eval_frame:_debug_get_cache_entry_list",
    )

    def __init__(
        self,
        gate: Gate,
        lock: FXTraceLock,
        calls: CompiledCalls,
        interpreter_exit: InterpreterExit,
        reset: Callable[..., None],
    ) -> None:
        super().__init__()
        self._gate, self._lock, self._calls = gate, lock, calls
        self._exit, self._reset_when_idle = interpreter_exit, reset
        self._codes: list[CodeType] = []
        self._skipped: weakref.WeakValueDictionary[int, CodeType] = weakref.WeakValueDictionary()  # by id; in torch 2.6
        self._most_codes = 64

    def apply(self) -> None:
        from torch._dynamo import convert_frame, decorators, guards

        self._disabled_code = getattr(decorators, "_nonrecursive_disable_wrapper_code", None)  # torch 2.8 and newer
        own = Path(SingleFlight._convert.__code__.co_filename).parent
        self._files = (convert_frame.ConvertFrame.__call__.__code__.co_filename, str(own))
        for name in ("reset", "reset_code_caches"):
            self.wrap(torch._dynamo, name, self._reset)
        self.wrap(convert_frame.CatchErrorsWrapper, "__call__", self._call_back)
        self.wrap(convert_frame.ConvertFrameAssert, "__call__", self._convert)
        self.wrap(guards.CheckFunctionManager, "invalidate", self._invalidate)
        for converter in (
            () if can_run_once_as_it_is() else (convert_frame.ConvertFrame, convert_frame.ConvertFrameAssert)
        ):
            self.wrap(converter, "__call__", self._convert_unless_skipped)

    def _invalidate(self, invalidate: Callable[..., None], made: Any, args: Any, kwargs: Any) -> None:
        """Keep the guards of an entry when an object is gone that they look for: other threads may be inside them.

        They are kept with the entry, which torch keeps as well. It lets go of the interpreter lock in each check.
        """
        checked = getattr(made, "guard_manager", None)
        invalidate(*args, **kwargs)
        if checked is not None and made.guard_manager is not checked:
            made.guard_manager.in_place_of = checked
            setattr(checked, _WAS_INSERTED, True)  # or else who waits to see it in its place would wait in vain

    def _reset(self, reset: Callable[[], None], _: Any, args: Any, kwargs: Any) -> None:
        exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)  # older torch has one of them
        if exporting() and threading.active_count() > 1:
            return  # a strict export begins with a reset; other threads run what it would free
        self._reset_when_idle(reset)
        self._skipped.clear()

    def _call_back(self, call_back: Callable[..., Any], callback: Any, args: Any, kwargs: Any) -> Any:
        """Stand before Dynamo's wait for the compile lock.

        Dynamo moves the entry of a hit to the front of its list. A thread that walks the list meanwhile can miss
        an entry that is there: it would wait for the lock, and compile it once more.
        """
        retry = self._retry_frame(self._caller(sys._getframe(1)))
        if retry is not None and retry.f_locals["tries"] < MOST_TRIES and has_entry(callback, args[0]):
            raise LookAgain
        try:
            return call_back(*args, **kwargs)
        except WaitCycleError as error:
            if error.waiter != threading.get_ident() or not can_run_once_as_it_is() or in_a_checkpoint():
                raise
            code = args[0].f_code
            warnings.warn(
                f"{code.co_name} ({code.co_filename}:{code.co_firstlineno}) runs eagerly, this once: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            return run_once_as_it_is(code, "its compile would wait for ever", self._calls.guarded_in(sys._getframe(1)))

    def _convert(self, convert: Callable[..., Any], converter: Any, args: Any, kwargs: Any) -> Any:
        """Stand around one conversion. torch holds the compile lock here."""
        frame = args[0]
        code = frame.f_code
        caller = self._caller(sys._getframe(1))
        if caller.f_code is self._disabled_code:  # torch looks for it as well, but stops at the frames here
            return as_it_is("disabled, but not what it calls")
        retry = self._retry_frame(caller)
        if retry is not None:
            if not self._gate.admit(code, retry.f_locals["seen"]):
                raise LookAgain
        elif self._finished_meanwhile(converter, frame):
            return run_once_as_it_is(code, "compiled by another thread", self._calls.guarded_in(caller))
        self._exit.before_compile()
        with self._lock.doing(f"compiling {code.co_name} ({code.co_filename}:{code.co_firstlineno})"):
            result = events.watched(
                events.Compile.of(code, self._calls.guarded_in(caller)),
                lambda: _blamed(convert, args, kwargs),
                reasons=lambda: events.explain(list(entries(converter, frame))[-MOST_EXPLAINED:], frame),
                made=entry_in,
            )
        entry = entry_in(result)
        self._keep(code, getattr(entry, "code", None))
        if entry is not None:
            remember(entry.guard_manager, converter)
            self._gate.finish(code, _inserted(entry.guard_manager))
        return result

    def _convert_unless_skipped(self, convert: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        """Let torch 2.6 free no entries that other threads are inside, or were given before they waited for the lock.

        It does so when code is to be skipped. Code that has entries among threads is treated as if it had too many;
        code that has none is skipped by all who waited: what one of them makes would be added to what is freed.
        """
        from torch._C._dynamo import eval_frame

        frame, _, *rest = args
        newest = next(iter(eval_frame._debug_get_cache_entry_list(frame.f_code)), None)
        skipped = self._skipped.get(id(frame.f_code)) is frame.f_code
        result = None if skipped else convert(frame, newest, *rest, **kwargs)
        if result is None and not alone() and eval_frame._debug_get_cache_entry_list(frame.f_code):
            return eval_frame.cache_limit_hit_flag  # type: ignore[attr-defined]
        if result is None:
            self._skipped[id(frame.f_code)] = frame.f_code
        return result

    def _keep(self, *codes: CodeType | None) -> None:
        """Hold code until nobody else does, and let go of it here.

        torch would free what a captured traceback has last under a mutex that others wait for with the interpreter
        lock; what Dynamo does when the code is freed can let them run.
        """
        self._codes += filter(None, codes)
        if len(self._codes) > self._most_codes:
            self._codes = [code for code in self._codes if sys.getrefcount(code) > NOBODY_ELSE]
            self._most_codes = 2 * len(self._codes) + 64

    def _caller(self, frame: FrameType) -> FrameType:
        """Return the frame that has called the converted one, from a frame of Dynamo's callback."""
        while frame.f_code is not RESUME_CODE and frame.f_code.co_filename.startswith(self._files):
            frame = cast("FrameType", frame.f_back)
        return frame

    def _retry_frame(self, caller: FrameType) -> FrameType | None:
        """Return the frame that will call again on ``LookAgain``, if nothing of the user's runs in between.

        By the identity of frames and not by code and name: a plain compiled object over the same code,
        called in the eager part of a guarded call, must not unwind that part.
        """
        while _calls_forward_first(caller):
            caller = cast("FrameType", caller.f_back)
        return caller if caller.f_code is RESUME_CODE or self._calls.catch(caller.f_code) else None

    def begins(self, frame: FrameType) -> bool:
        """Tell, from a frame of Dynamo's callback, whether nothing of a guarded call has run yet."""
        retry = self._retry_frame(self._caller(frame))
        return retry is not None and retry.f_code is not RESUME_CODE

    def _finished_meanwhile(self, converter: Any, frame: Any) -> bool:
        """Look in Dynamo's cache again, for a frame that cannot be called again (a function called in an eager part)."""
        if not self._gate.finished_elsewhere(frame.f_code):
            return False
        return can_run_once_as_it_is() and not in_a_checkpoint() and has_entry(converter, frame)


def _calls_forward_first(frame: FrameType) -> bool:
    """Tell whether ``frame`` is ``nn.Module``'s own around a forward, and no hook stands before that."""
    from torch.nn.modules import module

    if frame.f_code.co_filename != module.__file__ or "self" not in frame.f_locals:
        return False
    names = ("forward_pre_hooks", "backward_pre_hooks", "backward_hooks")
    return not any(getattr(frame.f_locals["self"], f"_{n}") or getattr(module, f"_global_{n}") for n in names)


def _blamed(convert: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Convert the frame, and say so if an argument that another thread has changed made that fail."""
    arguments = Arguments(args[0])
    try:
        return _converted(convert, args, kwargs)
    except Exception as error:
        blamed = arguments.blame(error, args[0].f_code.co_name)
        if blamed is None:
            raise
        raise blamed from error


def _converted(convert: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Convert the frame; do it again if another thread has changed a setting that the guards look at."""
    from torch._C._dynamo.guards import GlobalStateGuard

    while True:
        state = GlobalStateGuard()
        try:
            return convert(*args, **kwargs)
        except Exception:
            if state.check() or alone():
                raise


def _inserted(guard_manager: Any) -> Callable[[], bool]:
    reference = weakref.ref(guard_manager)

    def inserted() -> bool:
        manager = reference()
        return manager is None or manager.cache_entry is not None or hasattr(manager, _WAS_INSERTED)

    return inserted
