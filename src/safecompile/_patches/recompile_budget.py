"""How many graphs a function may have: for each thread, for the modules and devices that it is called with."""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FrameType, SimpleNamespace
from typing import Any

import torch

from safecompile._core import events
from safecompile._core.forks import lock_across_forks
from safecompile._core.guarded import Guarded
from safecompile._patches.cache_entries import converter_of, entries, entry_in
from safecompile._patches.compiled_call import CompiledCalls
from safecompile._patches.point import PatchPoint
from safecompile._patches.running_as_it_is import can_run_once_as_it_is, in_a_checkpoint, run_once_as_it_is

# How many values of a call are looked at for modules and tensors.
MOST_VALUES = 1000


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


@dataclass
class _Asked:
    """What a frame may have, and has, when Dynamo calls back for it."""

    guarded: Guarded | None
    owner: _Owner
    limit: int
    made: list[_Made]
    """What is known of its entries in Dynamo's cache. Not they themselves: who waits for the lock must not keep them."""
    all_threads: bool
    """Whether the graphs of all threads count: in a checkpointed region. A recomputation on another thread than the
    forward's must not compile what that has run as it is."""
    exceeded: tuple[int, int] | None = None
    """What was too much for torch, and its limit."""

    @property
    def count(self) -> int:
        """How many count for the limit."""
        return sum(made.owner.counts_for(self.owner, all_threads=self.all_threads) for made in self.made)

    @property
    def others(self) -> int:
        """How many belong to others, who are still there."""
        return sum(not made.owner.is_gone() for made in self.made) - self.count


class _Mine(threading.local):
    asked: _Asked | None = None


class RecompileBudget(PatchPoint):
    name = "recompile-budget"
    protects = "threads, replicas and devices use up one recompile limit; later shapes run eagerly in silence (S9)"
    upstream = "pytorch#177355; torch/_dynamo/cache_size.py"
    relies_on = tuple(
        f"torch._dynamo.convert_frame:{name}"
        for name in ("CatchErrorsWrapper", "ConvertFrameAssert", "compute_cache_size")
    )

    def __init__(self, calls: CompiledCalls) -> None:
        super().__init__()
        self._calls = calls
        self._made: weakref.WeakKeyDictionary[Any, _Made] = weakref.WeakKeyDictionary()  # by guard manager
        self._guard = lock_across_forks()  # guards the next: a warning has been given of the code of these
        self._warned: weakref.WeakSet[Any] = weakref.WeakSet()
        self._mine = _Mine()

    def mismatch(self) -> str | None:
        from torch._dynamo import convert_frame

        known = any(hasattr(convert_frame, name) for name in ("exceeds_recompile_limit", "exceeds_cache_size_limit"))
        return super().mismatch() if known else "torch._dynamo.convert_frame has no exceeds_recompile_limit"

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
        asked, before = self._ask(callback, frame), self._mine.asked
        stops = can_run_once_as_it_is() and not _raises_at_the_limit(callback)
        if stops and asked.count >= asked.limit:
            self._warn(callback, frame, asked, asked.count, f"for thread {threading.current_thread().name!r}")
            why = f"it has reached its recompile limit of {asked.limit}"
            # In a region not what may be in the cache by now and not later, or the other way round.
            return run_once_as_it_is(frame.f_code, why, asked.guarded, use_cache=not in_a_checkpoint())
        self._mine.asked = asked
        try:
            result = call_back(*args, **kwargs)
        finally:
            self._mine.asked = before
        if stops and asked.exceeded and getattr(result, "apply_to_code", False):
            self._warn(callback, frame, replace(asked, limit=asked.exceeded[1]), asked.exceeded[0], "for all")
            return replace(result, apply_to_code=False)
        return result

    def _ask(self, callback: Any, frame: Any) -> _Asked:
        from torch._dynamo import config

        call = self._calls.call_in(sys._getframe(1))
        guarded, owner, all_threads = self._calls.record(call), _owner(frame, call), in_a_checkpoint()
        limit = guarded.recompile_limit if guarded else getattr(converter_of(callback), "_recompile_limit", None)
        known = [self._made.get(entry.guard_manager) for entry in entries(callback, frame)]
        return _Asked(
            guarded,
            owner,
            limit or _torchs_limit(config),
            [made for made in known if made],
            all_threads=all_threads,
        )

    def _convert(self, convert: Callable[..., Any], converter: Any, args: Any, kwargs: Any) -> Any:
        """Note whose entry it is that is made. torch holds the compile lock here, and in the next two."""
        asked = self._mine.asked or self._ask(converter, args[0])
        current = events.current()
        conversion = convert(*args, **kwargs)
        entry = entry_in(conversion)
        if entry is not None and current is not None:
            compile_, _ = current
            self._made[entry.guard_manager] = _Made(asked.owner, compile_.thread, next(iter(compile_.reasons), "?"))
        return conversion

    def _count(self, count: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        """Leave out what belongs to others: torch compares what is returned with the limits.

        What belongs to ended threads, or is for modules that are gone, counts for the limit of all code (256): a thread
        for each request, or a replica, must not compile for ever.
        """
        from torch._dynamo import config

        size, asked, torchs_limit = count(*args, **kwargs), self._mine.asked, _torchs_limit(config)
        if asked is None:
            return size
        size.num_cache_entries -= asked.others
        if hasattr(size, "total_cache_entries_all_regions"):
            size.total_cache_entries_all_regions -= asked.others
        same = min(size.num_cache_entries_with_same_id_matched_objs, asked.count)
        size.num_cache_entries_with_same_id_matched_objs = (
            max(same, torchs_limit) if asked.count >= asked.limit else min(same, torchs_limit - 1)
        )
        return size

    def _exceeds(self, exceeds: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        from torch._dynamo import config

        size, compile_id = args
        asked = self._mine.asked
        number = max(0, compile_id.frame_compile_id - (asked.others if asked else 0))
        exceeded, setting = exceeds(size, SimpleNamespace(frame_compile_id=number))
        if exceeded and asked:
            asked.exceeded = number, getattr(config, setting)
        return exceeded, setting

    def _warn(self, callback: Any, frame: Any, asked: _Asked, count: int, whose: str) -> None:
        """Warn once for a callable, until Dynamo is reset."""
        managers = [entry.guard_manager for entry in entries(callback, frame)]
        with self._guard:
            if any(manager in self._warned for manager in managers):
                return
            self._warned.update(managers)
        me, (name, filename, line) = threading.current_thread(), events.described(frame.f_code)
        reasons = tuple(sorted({(made.thread, made.reason) for made in asked.made}))
        events.publish(
            events.RecompileLimit(
                name, filename, line, me.name, threading.get_ident(), events.clock(), asked.limit, count, reasons
            )
        )
        listed = "".join(f"\n  thread {thread!r}: {reason}" for thread, reason in reasons)
        warnings.warn(
            f"{name} ({filename}:{line}) has {count} graphs {whose}, and the limit is {asked.limit}: calls "
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
    devices = set[str]()
    for value in _inside(values):
        if isinstance(value, torch.nn.Module):
            things.append(value)
        elif isinstance(value, torch.Tensor):
            devices.add(str(value.device))
    instance = frame.f_locals.get("self")
    if hasattr(instance, "__weakref__") and not isinstance(instance, torch.Tensor):
        things.append(instance)
    # In their order: two modules can be called as (a, b) and as (b, a).
    same = tuple(dict.fromkeys(map(_Same, things)))
    return _Owner(weakref.ref(threading.current_thread()), same, tuple(sorted(devices)))


def _inside(values: list[Any]) -> Iterator[Any]:
    """Return what is in nested containers of Python's own: those of others would run code that is not ours."""
    seen = set[int]()
    while values and len(seen) < MOST_VALUES:
        value = values.pop(0)
        if type(value) in (list, tuple, dict):
            if id(value) not in seen:
                seen.add(id(value))
                values += value.values() if type(value) is dict else value
        else:
            seen.add(id(value))
            yield value


def _torchs_limit(config: Any) -> int:
    limit: int = config.recompile_limit if hasattr(config, "recompile_limit") else config.cache_size_limit  # torch 2.6
    return limit


def _raises_at_the_limit(callback: Any) -> bool:
    """Tell whether the limit is an error: for ``fullgraph=True``, or for all."""
    from torch._dynamo import config

    return bool(config.fail_on_recompile_limit_hit or getattr(converter_of(callback), "_one_graph", False))
