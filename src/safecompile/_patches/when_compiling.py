"""What a call does that needs a graph while another thread compiles: ``when_compiling=`` of its guarded callable."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from safecompile._core.errors import CompileInProgressError
from safecompile._core.guarded import Guarded
from safecompile._core.lock import FXTraceLock
from safecompile._patches.cache_entries import has_entry
from safecompile._patches.compiled_call import CompiledCalls
from safecompile._patches.point import PatchPoint
from safecompile._patches.running_as_it_is import can_run_once_as_it_is, in_a_checkpoint, run_once_as_it_is


class WhenCompiling(PatchPoint):
    name = "when-compiling"
    protects = "requests wait for the compile of another thread (when_compiling=)"
    upstream = "torch/_dynamo/convert_frame.py, CatchErrorsWrapper.__call__"
    relies_on = ("torch._dynamo.convert_frame:CatchErrorsWrapper",)

    def __init__(self, lock: FXTraceLock, calls: CompiledCalls, begins: Callable[[FrameType], bool]) -> None:
        """``begins`` tells whether nothing of a guarded call has run yet, seen from a frame of Dynamo's callback."""
        super().__init__()
        self._lock, self._calls, self._begins = lock, calls, begins

    def apply(self) -> None:
        from torch._dynamo import convert_frame

        self.wrap(convert_frame.CatchErrorsWrapper, "__call__", self._call_back)

    def _call_back(self, call_back: Callable[..., Any], callback: Any, args: Any, kwargs: Any) -> Any:
        """Stand before Dynamo's wait for the compile lock."""
        guarded = self._calls.guarded_in(sys._getframe(1))
        if guarded is None:
            return call_back(*args, **kwargs)
        if guarded.when_compiling != "wait" and not _is_left_alone(args[0].f_code):
            # Kept while Dynamo looks at the frame and compiles it: no other thread gets in between, and none is waited for.
            if self._lock.acquire(timeout=0):
                try:
                    return call_back(*args, **kwargs)
                finally:
                    self._lock.release()
            if not in_a_checkpoint():
                self._refuse(guarded, callback, args[0])
                if can_run_once_as_it_is():
                    return run_once_as_it_is(args[0].f_code, self._lock.held_by(), guarded)
        me = threading.get_ident()
        before = self._lock.waited_by(me)
        try:
            return call_back(*args, **kwargs)
        finally:
            if waited := self._lock.waited_by(me) - before:
                guarded.waited(waited)

    def _refuse(self, guarded: Guarded, callback: Any, frame: Any) -> None:
        """Raise, if the callable is to; but in the middle of a call, which cannot be made again, the rest runs eagerly."""
        if guarded.when_compiling != "error" or not self._begins(sys._getframe(1)) or has_entry(callback, frame):
            return
        raise CompileInProgressError(
            f"{guarded.name} ({guarded.filename}:{guarded.line}) needs a graph for these arguments, and "
            f"{self._lock.held_by()}. Call it again later, warm it up before (safecompile.warmup), or let it wait or run "
            f'eagerly (when_compiling="wait", "eager").'
        )


def _is_left_alone(code: CodeType) -> bool:
    """Tell whether Dynamo runs frames of this code as they are, and compiles nothing for them."""
    from torch._dynamo import trace_rules

    return bool(trace_rules.check(code))
