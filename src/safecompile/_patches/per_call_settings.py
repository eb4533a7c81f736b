"""What a thread sets for its own calls, and torch keeps for the process."""

from __future__ import annotations

import functools
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, cast

from safecompile._core.forks import lock_across_forks
from safecompile._patches.company import alone
from safecompile._patches.point import PatchPoint
from safecompile._patches.rewriting import codes_in, copy_of, redirecting


class Stance(PatchPoint):
    name = "stance"
    protects = "set_stance in one thread decides for all, and is left behind by out-of-order exits (S7, P2)"
    upstream = "torch/_dynamo/eval_frame.py, _set_stance"
    relies_on = ("torch._dynamo.eval_frame:_set_stance", "torch._dynamo.eval_frame:_stance")

    def __init__(self) -> None:
        super().__init__()
        self._guard = lock_across_forks()
        self._default: Any = None
        self._own: dict[int, Any] = {}

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


class FullgraphCalls(PatchPoint):
    name = "fullgraph-calls"
    protects = (
        "while a thread is in a fullgraph=True call, what follows a graph break in another one runs eagerly, and can stay so; "
        'calls die with "found no compiled frames" (S7)'
    )
    upstream = "torch/_dynamo/eval_frame.py, set_fullgraph_compiled_frame_count (set_eval_frame_override before 2.13)"

    def needed(self) -> bool:
        from torch._dynamo import eval_frame

        return hasattr(eval_frame, "set_eval_frame_override") or _count_is_the_processes()

    def apply(self) -> None:
        from torch._dynamo import eval_frame

        if hasattr(eval_frame, "set_eval_frame_override"):
            self.wrap(eval_frame, "set_eval_frame_override", self._override)
        else:
            self.wrap(eval_frame, "set_fullgraph_compiled_frame_count", self._count)

    # Either tells Dynamo that a thread is inside a fullgraph call, where nothing more is to be compiled. The process
    # has one: among threads none is told, what a call meets is compiled, and no call is said to have compiled nothing.

    def _count(self, set_count: Callable[[int], int], _: Any, args: Any, kwargs: Any) -> int:
        if args[0] == 0 and alone():
            return set_count(0)
        count = set_count(_NO_COUNT)
        return _NO_COUNT if args[0] == 0 else count if count >= 0 else 1

    def _override(self, set_override: Callable[[Any], Any], _: Any, args: Any, kwargs: Any) -> Any:
        from torch._C._dynamo.eval_frame import _EvalFrameOverride  # type: ignore[attr-defined]

        return set_override(*args if alone() else [_EvalFrameOverride.NONE])


_NO_COUNT = -1


def _count_is_the_processes() -> bool:
    """Tell whether threads share the count of compiled frames, as in torch 2.13 and 2.14."""
    from torch._C._dynamo import eval_frame

    if (set_count := getattr(eval_frame, "set_fullgraph_compiled_frame_count", None)) is None:
        return False
    mark, found = -2, []  # like all numbers below zero it means that nothing is counted
    before = set_count(mark)
    thread = threading.Thread(target=lambda: found.append(set_count(mark)))
    thread.start()
    thread.join()
    set_count(before)
    return found == [mark]


def excuse_fullgraph_call() -> None:
    """Let the calling thread's call end without a compiled frame: it was run as it is, this once."""
    from torch._C._dynamo import eval_frame

    if set_count := getattr(eval_frame, "set_fullgraph_compiled_frame_count", None):
        count = set_count(_NO_COUNT)
        set_count(max(count, 1) if count >= 0 else count)


class _Settings(threading.local):
    exports = 0

    def __init__(self) -> None:
        self.values: defaultdict[int, list[Any]] = defaultdict(list)


class CallSettings(PatchPoint):
    name = "call-settings"
    protects = (
        "`dynamic=` of one thread's calls, and exports, decide how others compile, and stay in the configuration (S7)"
    )
    upstream = "torch/utils/_config_module.py, _make_closure_patcher"
    relies_on = ("torch._dynamo.config:_make_closure_patcher",)

    def __init__(self) -> None:
        super().__init__()
        self._mine = _Settings()

    def needed(self) -> bool:
        from torch._dynamo import config

        # From torch 2.12 on each thread has a configuration of its own.
        return not hasattr(vars(config)["_config"]["automatic_dynamic_shapes"].user_override, "get")

    def apply(self) -> None:
        from torch._dynamo import config
        from torch._functorch import config as functorch_config

        codes = {code.co_name: code for code in codes_in(config._make_closure_patcher.__code__)}
        for module in (config, functorch_config):
            entries = vars(module)["_config"].values()
            own = _with_own_value(type(next(iter(entries))), self._mine, codes["change"], codes["revert"])
            for entry in entries:
                self.replace(entry, "__class__", own)

    @contextmanager
    def kept_to_this_thread(self) -> Iterator[None]:
        """Let the calling thread alone see what it sets, and forget it at the end."""
        mine = self._mine
        before = defaultdict(list, {key: own.copy() for key, own in mine.values.items()})
        mine.exports += 1
        try:
            yield
        finally:
            mine.exports -= 1
            mine.values = before


def _with_own_value(cls: Any, mine: _Settings, change: CodeType, revert: CodeType) -> type:
    """Return a class of settings that have a value for each thread which has changed them for a call or an export."""

    def get(entry: Any) -> Any:
        own = mine.values.get(id(entry))
        return own[-1] if own else vars(entry).get("user_override", cls.user_override)

    def put(entry: Any, value: Any) -> None:
        own, setter = mine.values[id(entry)], sys._getframe(1).f_code
        if setter is revert and own:  # else the call began before the installation
            own.pop()
        elif setter is change or (mine.exports and not own):
            own.append(value)
        elif own:
            own[-1] = value
        else:
            vars(entry)["user_override"] = value

    return type(cls.__name__, (cls,), {"user_override": property(get, put)})
