"""Which thread waits for which, as far as their stacks show it."""

from __future__ import annotations

import concurrent.futures
import queue
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from safecompile._core.stacks import outwards, stacks_of_others

__all__ = ["helpers", "waits_for"]

# Threads (by ident) that run something for a thread which has started it, or submitted it, while it compiled.
helpers: dict[int, int] = {}

_WAITING = {threading.__file__, queue.__file__, concurrent.futures._base.__file__}
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_OBJECTS = (*_LOCKS, threading.Condition, threading.Event, threading.Semaphore, threading.Barrier, queue.Queue)


def waits_for(waiting: int, other: int) -> bool:
    """Tell whether the thread ``waiting`` waits, maybe by way of further threads, for ``other``.

    Seen are joins, futures, any wait for a helper of one's own, and waits without a time limit for a lock, an event or
    a queue that a function has in which the other thread is.
    """
    stacks = stacks_of_others()
    stacks[threading.get_ident()] = list(outwards(sys._getframe(1)))
    todo, seen = [waiting], set[int]()
    try:
        while todo:
            one = todo.pop()
            if one == other:
                return True
            if one not in seen and one in stacks:
                seen.add(one)
                todo.extend(_waited_for(one, stacks))
        return False
    finally:
        stacks.clear()  # a frame that is in a list of its own would stay


def _waited_for(ident: int, stacks: dict[int, list[FrameType]]) -> Iterator[int]:
    top = stacks[ident][0]
    things = [thing for thing in _named(top) if _blocks(thing)]
    if top.f_code.co_filename in _WAITING:
        yield from (helper for helper, works_for in list(helpers.items()) if works_for == ident)
        for frame in stacks[ident]:
            if frame.f_code.co_filename not in _WAITING:
                continue
            for one in (frame.f_locals.get("self"), *frame.f_locals.get("fs", ())):
                if isinstance(one, threading.Thread) and frame.f_code is threading.Thread.join.__code__:
                    yield one.ident or 0
                elif isinstance(one, concurrent.futures.Future):
                    yield from (other for other, stack in stacks.items() if _runs(one, stack))
                elif isinstance(one, _OBJECTS) and frame.f_locals.get("timeout") is None:
                    things.append(one)
    for thing in things:
        owner = _owner(thing)
        for other, stack in stacks.items():
            if other != ident and (
                other == owner or (not owner and any(thing is one for f in stack for one in _named(f)))
            ):
                yield other


def _runs(future: Any, stack: list[FrameType]) -> bool:
    return any(getattr(frame.f_locals.get("self"), "future", None) is future for frame in stack)


def _named(frame: FrameType) -> Iterator[Any]:
    """Return what a function has a name for: its locals, the globals that it uses, and the attributes of both."""
    names = frame.f_code.co_names
    for value in [*frame.f_locals.values(), *(frame.f_globals[name] for name in names if name in frame.f_globals)]:
        yield value
        try:
            attributes = object.__getattribute__(value, "__dict__")
        except AttributeError:
            continue
        yield from (attributes[name] for name in names if name in attributes)


def _blocks(thing: Any) -> bool:
    """Tell whether a thread can be blocked in C code for ``thing``, with no frame to show it."""
    if isinstance(thing, queue.SimpleQueue):
        return thing.empty()
    return isinstance(thing, _LOCKS) and (_owner(thing) is not None or getattr(thing, "locked", bool)())


def _owner(lock: Any) -> int | None:
    """Return the ident of the thread that has a reentrant lock, which is told nowhere but in its text."""
    words = repr(lock).partition(" owner=")[2].split() if isinstance(lock, _LOCKS) else []
    return int(words[0]) or None if words else None
