"""How many graphs a function may have: for each thread, for the modules and devices that it is called with."""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from safecompile._core import events
from safecompile._patches.cache_entries import entry_in
from safecompile._patches.compiled_call import CompiledCalls
from safecompile._patches.point import PatchPoint
from safecompile._patches.running_as_it_is import can_run_once_as_it_is, in_a_checkpoint, run_once_as_it_is

__all__ = ["RecompileBudget"]


class _Same:
    """Compares and hashes as the object that it refers to weakly, by identity."""

    def __init__(self, thing: object) -> None:
        self._id, self._of = id(thing), weakref.ref(thing)

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._of() is other._of() is not None

    def is_gone(self) -> bool:
        return self._of() is None


@dataclass(frozen=True)
class _Owner:
    """Whose graph it is."""

    thread: weakref.ref[threading.Thread]
    things: tuple[_Same, ...]
    """What is compiled, and the modules that it is called with."""
    devices: tuple[str, ...]

    def is_gone(self) -> bool:
        thread = self.thread()
        return thread is None or not thread.is_alive() or any(thing.is_gone() for thing in self.things)

    def counts_for(self, other: _Owner, *, all_threads: bool) -> bool:
        same = (self.things, self.devices) == (other.things, other.devices)
        return same and (all_threads or self.thread() is other.thread())


@dataclass(frozen=True)
class _Made:
    """What is known of one entry in Dynamo's cache."""

    owner: _Owner
    thread: str
    reason: str


class RecompileBudget(PatchPoint):
    name = "recompile-budget"
    protects = "threads, replicas and devices use up one recompile limit; later shapes run eagerly in silence (S9)"
    upstream = "pytorch#177355; torch/_dynamo/cache_size.py"

    def __init__(self, calls: CompiledCalls) -> None:
        super().__init__()
        self._calls = calls
        self._made: weakref.WeakKeyDictionary[Any, _Made] = weakref.WeakKeyDictionary()  # by guard manager
        self._warned: weakref.WeakValueDictionary[int, CodeType] = weakref.WeakValueDictionary()  # by id
        # Guarded by the compile lock: how many entries belong to others; which number of compiles was too much, for which
        # limit.
        self._others, self._exceeded = 0, (0, 0)

    def mismatch(self) -> str | None:
        from torch._dynamo import convert_frame

        names = ("CatchErrorsWrapper", "ConvertFrameAssert", "compute_cache_size")
        missing = [name for name in names if not hasattr(convert_frame, name)]
        if not (
            hasattr(convert_frame, "exceeds_recompile_limit") or hasattr(convert_frame, "exceeds_cache_size_limit")
        ):
            missing.append("exceeds_recompile_limit")
        return f"torch._dynamo.convert_frame has no {', '.join(missing)}" if missing else None

    def apply(self) -> None:
        from torch._dynamo import convert_frame

        is_new = hasattr(convert_frame, "exceeds_recompile_limit")  # not in torch 2.6
        self.wrap(convert_frame.CatchErrorsWrapper, "__call__", self._call_back)
        self.wrap(convert_frame.ConvertFrameAssert, "__call__", self._convert)
        self.wrap(convert_frame, "compute_cache_size", self._count)
        self.wrap(convert_frame, "exceeds_recompile_limit" if is_new else "exceeds_cache_size_limit", self._exceeds)

    def _call_back(self, call_back: Callable[..., Any], callback: Any, args: Any, kwargs: Any) -> Any:
        """Let a frame that has all the graphs it may have run as it is, this once: torch would stop for all of its code."""
        frame = args[0]
        if not can_run_once_as_it_is() or _raises_at_the_limit(callback):
            return call_back(*args, **kwargs)
        call = self._calls.call_in(sys._getframe(1))
        own, limit = self._own(frame, call), self._limit(call)
        if len(own) >= limit:
            self._warn(frame.f_code, len(own), limit, f"for thread {threading.current_thread().name!r}")
            why = f"it has reached its recompile limit of {limit}"
            return run_once_as_it_is(frame.f_code, why, self._calls.record(call), use_cache=True)
        result = call_back(*args, **kwargs)
        if getattr(result, "apply_to_code", False) and _runs_only_what_there_is(result):
            self._warn(frame.f_code, *self._exceeded, "for all that ever called it")
            return replace(result, apply_to_code=False)
        return result

    def _convert(self, convert: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        """Note whose entry it is that is made. torch holds the compile lock here, and in the next two."""
        owner = _owner(args[0], self._calls.call_in(sys._getframe(1)))
        current = events.current()
        conversion = convert(*args, **kwargs)
        entry = entry_in(conversion)
        if entry is not None and current is not None:
            compile_, _ = current
            reason = next(iter(compile_.reasons), "not asked for")
            self._made[entry.guard_manager] = _Made(owner, compile_.thread, reason)
        return conversion

    def _count(self, count: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        """Leave out what belongs to others: torch compares what is returned with the limits.

        What belongs to ended threads, or is for modules that are gone, counts for the limit of all code (256): a thread
        for each request, or a replica, must not compile for ever.
        """
        from torch._dynamo import config

        size, frame, call = count(*args, **kwargs), args[0], self._calls.call_in(sys._getframe(1))
        own, limit, torchs_limit = len(self._own(frame, call)), self._limit(call), _torchs_limit(config)
        self._others = sum(not made.owner.is_gone() for made in self._entries(frame.f_code)) - own
        size.num_cache_entries -= self._others
        if hasattr(size, "total_cache_entries_all_regions"):
            size.total_cache_entries_all_regions -= self._others
        same = min(size.num_cache_entries_with_same_id_matched_objs, own)
        size.num_cache_entries_with_same_id_matched_objs = (
            max(same, torchs_limit) if own >= limit else min(same, torchs_limit - 1)
        )
        return size

    def _exceeds(self, exceeds: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        from torch._dynamo import config

        size, compile_id = args
        number = max(0, compile_id.frame_compile_id - self._others)
        exceeded, setting = exceeds(size, SimpleNamespace(frame_compile_id=number))
        if exceeded:
            self._exceeded = number, getattr(config, setting)
        return exceeded, setting

    def _entries(self, code: CodeType) -> Iterator[_Made]:
        from torch._C._dynamo import eval_frame

        for entry in eval_frame._debug_get_cache_entry_list(code):
            if (made := self._made.get(entry.guard_manager)) is not None:
                yield made

    def _own(self, frame: Any, call: FrameType | None) -> list[_Made]:
        """Return the entries that count for a frame.

        In a checkpointed region those of all threads do: a recomputation on another thread than the forward's must not
        compile what that has run as it is.
        """
        owner, all_threads = _owner(frame, call), in_a_checkpoint()
        return [made for made in self._entries(frame.f_code) if made.owner.counts_for(owner, all_threads=all_threads)]

    def _limit(self, call: FrameType | None) -> int:
        from torch._dynamo import config

        guarded = self._calls.record(call)
        return (guarded.recompile_limit if guarded else None) or _torchs_limit(config)

    def _warn(self, code: CodeType, count: int, limit: int, whose: str) -> None:
        if self._warned.get(id(code)) is code:
            return
        self._warned[id(code)] = code
        me = threading.current_thread()
        reasons = tuple(sorted({(made.thread, made.reason) for made in self._entries(code)}))
        name, filename, line = events.described(code)
        events.publish(
            events.RecompileLimit(
                name, filename, line, me.name, threading.get_ident(), events.clock(), limit, count, reasons
            )
        )
        listed = "".join(f"\n  thread {thread!r}: {reason}" for thread, reason in reasons)
        warnings.warn(
            f"{name} ({filename}:{line}) has {count} graphs {whose}, and the limit is {limit}: calls "
            "that fit none of them run eagerly. Let what changes be dynamic, or raise the limit (recompile_limit=). "
            f"Why it was compiled, by thread:{listed}",
            RuntimeWarning,
            stacklevel=3,
        )


def _owner(frame: Any, call: FrameType | None) -> _Owner:
    """Describe for whom a frame is compiled: thread, callable, modules, and devices of its tensors."""
    values: list[Any] = list(frame.f_locals.values())
    things: list[Any] = []
    if call is not None:
        values += [call.f_locals["args"], call.f_locals["kwargs"]]
        things.append(call.f_locals["self"])
    leaves = pytree.tree_leaves(values)
    things += [leaf for leaf in leaves if isinstance(leaf, torch.nn.Module)]
    if (instance := frame.f_locals.get("self")) is not None and hasattr(instance, "__weakref__"):
        things.append(instance)
    devices = {str(leaf.device) for leaf in leaves if isinstance(leaf, torch.Tensor)}
    # In their order: two modules can be called as (a, b) and as (b, a).
    same = tuple(dict.fromkeys(map(_Same, things)))
    return _Owner(weakref.ref(threading.current_thread()), same, tuple(sorted(devices)))


def _runs_only_what_there_is(result: Any) -> bool:
    """Tell whether a callback has returned that nothing more is to be compiled: the limit of all code is reached."""
    from torch._dynamo.types import FrameAction  # type: ignore[attr-defined]

    strategy = result.frame_exec_strategy
    return strategy is not None and strategy.cur_action == FrameAction.RUN_ONLY


def _torchs_limit(config: Any) -> int:
    limit: int = config.recompile_limit if hasattr(config, "recompile_limit") else config.cache_size_limit  # torch 2.6
    return limit


def _raises_at_the_limit(callback: Any) -> bool:
    """Tell whether the limit is an error: for ``fullgraph=True``, or for all."""
    from torch._dynamo import config

    if config.fail_on_recompile_limit_hit:
        return True
    for name in ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable"):  # in newer and in older torch
        if hasattr(callback, name):
            return bool(getattr(getattr(callback, name), "_one_graph", False))
    return False
