"""Which thread waits for which, as far as their stacks show it."""

from __future__ import annotations

import concurrent.futures.thread
import dis
import inspect
import queue
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, Protocol

from safecompile._core.stacks import outwards, stacks_of_others


class Hold(Protocol):
    """That a thread has the lock."""

    ident: int
    depth: int
    """0 once it has given it back."""


# Threads (by ident) that run something which another has started, or submitted, while it had the lock.
helpers: dict[int, Hold] = {}

_RUN = concurrent.futures.thread._WorkItem.run.__code__
_SHOW_LOCALS = {"locals", "vars", "dir", "eval", "exec"}
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
        yield from (helper for helper, hold in list(helpers.items()) if hold.depth and hold.ident == ident)
        for frame in stacks[ident]:
            if frame.f_code.co_filename not in _WAITING:
                continue
            variables = _variables(frame)
            endless, futures = variables.get("timeout") is None, variables.get("fs")
            for one in (variables.get("self"), *(futures if isinstance(futures, (list, tuple, set, dict)) else ())):
                if isinstance(one, threading.Thread) and frame.f_code is threading.Thread.join.__code__ and endless:
                    yield one.ident or 0
                elif isinstance(one, concurrent.futures.Future):
                    yield from (other for other, stack in stacks.items() if _runs(one, stack))
                elif isinstance(one, _OBJECTS) and endless:
                    things.append(one)
    for thing in things:
        owner = _owner(thing)
        for other, stack in stacks.items():
            if other != ident and (
                other == owner or (not owner and any(thing is one for f in stack for one in _named(f)))
            ):
                yield other


def _runs(future: Any, stack: list[FrameType]) -> bool:
    """Tell whether a thread is at work for a future of a pool of threads."""
    tasks = (_variables(frame).get("self") for frame in stack if frame.f_code is _RUN)
    return any(getattr(task, "future", None) is future for task in tasks)


def _named(frame: FrameType) -> Iterator[Any]:
    """Return what a function has a name for: its locals, the globals that it uses, and the attributes of both."""
    names = frame.f_code.co_names
    for value in [*_variables(frame).values(), *(frame.f_globals[name] for name in names if name in frame.f_globals)]:
        yield value
        try:
            attributes = object.__getattribute__(value, "__dict__")
        except AttributeError:
            continue
        yield from (attributes[name] for name in names if name in attributes)


_OF_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _variables(frame: FrameType) -> dict[str, Any]:
    """Return a copy of the variables of a function, or nothing if that could be noticed."""
    code = frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED or frame.f_trace is not None or _shows_its_locals(code):
        return {}
    if code.co_flags & _OF_GENERATORS and sys.version_info >= (3, 13):
        return {}  # the variables can be gone with the generator: CPython reads them all the same, and crashes
    variables = dict(frame.f_locals)
    if sys.version_info < (3, 13):
        frame.f_locals.clear()  # the frame would keep this copy, and what is in it
    return variables


def _shows_its_locals(code: CodeType) -> bool:
    if not _SHOW_LOCALS.intersection(code.co_names):
        return False
    return any(one.opname == "LOAD_GLOBAL" and one.argval in _SHOW_LOCALS for one in dis.get_instructions(code))


def _blocks(thing: Any) -> bool:
    """Tell whether a thread can be blocked in C code for ``thing``, with no frame to show it."""
    if isinstance(thing, queue.SimpleQueue):
        return thing.empty()
    return isinstance(thing, _LOCKS) and (_owner(thing) is not None or getattr(thing, "locked", bool)())


def _owner(lock: Any) -> int | None:
    """Return the ident of the thread that has a reentrant lock, which is told nowhere but in its text."""
    words = repr(lock).partition(" owner=")[2].split() if isinstance(lock, _LOCKS) else []
    return int(words[0]) or None if words else None
