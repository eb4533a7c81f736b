"""What a thread sets for its own calls, and torch keeps for the process."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any, cast

from safecompile._core.forks import lock_across_forks
from safecompile._patches.point import PatchPoint
from safecompile._patches.rewriting import copy_of, redirecting

__all__ = ["FullgraphCount", "Stance"]


class Stance(PatchPoint):
    name = "stance"
    protects = "set_stance in one thread decides for all, and is left behind by out-of-order exits (S7, P2)"
    upstream = "torch/_dynamo/eval_frame.py, _set_stance"

    def __init__(self) -> None:
        super().__init__()
        self._guard = lock_across_forks()
        self._default: Any = None
        self._own: dict[int, Any] = {}

    def mismatch(self) -> str | None:
        from torch._dynamo import eval_frame

        has = hasattr(eval_frame, "_set_stance") and hasattr(eval_frame, "_stance")
        return None if has else "torch._dynamo.eval_frame has no _set_stance"

    def apply(self) -> None:
        from torch._dynamo import eval_frame

        self._default = eval_frame._stance
        original = copy_of(eval_frame._set_stance)
        self.recode(cast("Any", eval_frame._set_stance), redirecting(functools.partial(self._set, original)))
        # In place of the one stance only while some thread has its own: warm calls read it.
        self._each = type("StanceOfThisThread", (), {"__getattr__": lambda _, name: getattr(self._mine(), name)})()

    def restore(self) -> None:
        from torch._dynamo import eval_frame

        if self.active and eval_frame._stance is self._each:
            eval_frame._stance = self._mine()
        self._own.clear()
        super().restore()

    def _mine(self) -> Any:
        return self._own.get(threading.get_ident(), self._default)

    def _set(self, original: Callable[[Any], Any], stance: Any) -> Any:
        from torch._dynamo import eval_frame

        with self._guard:
            original(eval_frame._stance)  # refuses inside a compiled region
            prior = self._mine()
            alive = {thread.ident for thread in threading.enumerate()}
            self._own = {ident: own for ident, own in self._own.items() if ident in alive}
            self._own[threading.get_ident()] = stance
            if stance == self._default:
                del self._own[threading.get_ident()]
            eval_frame._stance = self._each if self._own else self._default
            return prior


class _Call(threading.local):
    ticket: int | None = None
    excused = False


class FullgraphCount(PatchPoint):
    name = "fullgraph-count"
    protects = 'a fullgraph=True call beside others dies with "found no compiled frames" (S7)'
    upstream = "torch/_dynamo/eval_frame.py, set_fullgraph_compiled_frame_count"

    def __init__(self) -> None:
        super().__init__()
        self._call = _Call()
        self._tickets = itertools.count()

    def needed(self) -> bool:
        from torch._dynamo import eval_frame

        return hasattr(eval_frame, "set_fullgraph_compiled_frame_count")

    def mismatch(self) -> str | None:
        return None

    def apply(self) -> None:
        from torch._dynamo import eval_frame

        self.wrap(eval_frame, "set_fullgraph_compiled_frame_count", self._set)

    def _set(self, set_count: Callable[[int], int], _: Any, args: Any, kwargs: Any) -> int:
        """Start (0) or end (-1) the count of a call. The process has one count; only an undisturbed one is believed."""
        mine = self._call.ticket
        starts = args[0] == 0
        if starts == (mine is not None):
            return 0 if starts else -1  # inside a call that is counted already, or after its end
        if starts:
            self._call.excused = False
            next(self._tickets)  # before, so that others see that their count is disturbed
            set_count(0)
            self._call.ticket = next(self._tickets)
            return -1
        self._call.ticket = None
        count = set_count(-1)
        undisturbed = mine is not None and next(self._tickets) == mine + 1
        return count if undisturbed and not self._call.excused else max(count, 1)

    def excuse(self) -> None:
        """Let the calling thread's call end without a compiled frame: it was run as it is, this once."""
        self._call.excused = True
