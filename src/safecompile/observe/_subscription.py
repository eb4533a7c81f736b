"""``subscribe``: a function of one's own is told what happens."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar, overload

import torch

from safecompile._core import events
from safecompile._core.events import Call, Compile, EagerRun, RecompileLimit, Wait
from safecompile._installation import install

__all__ = ["KINDS", "Subscription", "subscribe"]

_E = TypeVar("_E", Call, Compile, EagerRun, RecompileLimit, Wait)

KINDS: tuple[type[Any], ...] = (Call, Compile, EagerRun, RecompileLimit, Wait)


class Subscription:
    """Until it is closed, events are told. Made by ``subscribe``; a context manager that closes it."""

    def __init__(self, callback: Callable[[Any], object], kinds: tuple[type[Any], ...]) -> None:
        self._callback, self._closed = callback, False
        # A part of a call that runs as it is has Dynamo switched on: it would compile the callback.
        disable: Any = torch.compiler.disable
        self._told = disable(self._tell)
        events.subscribe(self._told, *kinds)

    def _tell(self, event: Any) -> None:
        if not self._closed:  # a compile tells those who had subscribed when it began
            self._callback(event)

    def close(self) -> None:
        """Tell nothing from now on. A callback that runs at this moment in another thread goes on; again is nothing."""
        self._closed = True
        events.unsubscribe(self._told)

    def __enter__(self) -> Subscription:  # noqa: PYI034  Self is newer than Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@overload
def subscribe(callback: Callable[[_E], object], kind: type[_E], /) -> Subscription: ...
@overload
def subscribe(callback: Callable[[Any], object], *kinds: type[Any]) -> Subscription: ...
def subscribe(callback: Callable[[Any], object], *kinds: type[Any]) -> Subscription:
    """Call ``callback`` with each event of these kinds from now on, until the subscription is closed.

    It is called in the thread that the event happened in, after it, and before that thread goes on. For a compile, a
    wait that got the lock and some eager runs that thread holds ``fx_trace_lock``, so that all other compiles wait for
    the callback; it must be quick (count, append, put into a queue), must not wait for another thread, and must not call
    compiled code. For calls and recompile limits the lock is not held. What the callback raises is logged under
    ``safecompile`` and goes no further, except for what is no ``Exception``, e.g. ``KeyboardInterrupt``.

    Told are compiles and calls that begin, and all else that ends, from now on. The patches are installed; after
    ``uninstall()`` no events come until they are installed again.

    Args:
        callback: takes the event.
        *kinds: which events, as their classes; by default all but ``Call``. Subscribing to that makes each warm
            call of each guarded callable slower: by about 30 % for the smallest function (one addition of three numbers,
            with the backend ``"eager"``) and a callback that does nothing. The others cost a warm call nothing.

    Returns:
        the subscription: close it, or use it in a ``with`` statement.

    Raises:
        TypeError: the callback is not callable or is a coroutine function, or a kind is not one of the event classes.
        PatchesInUseError: the calling thread is inside a trace or compile that began without the patches.
    """
    given: object = callback
    if not callable(given) or inspect.iscoroutinefunction(callback):
        raise TypeError(f"subscribe takes a plain function of one event, not {callback!r}.")
    if unknown := [kind for kind in kinds if not any(kind is one for one in KINDS)]:
        names = ", ".join(f"observe.{one.__name__}" for one in KINDS)
        raise TypeError(f"subscribe takes the classes {names} as kinds of events, not {unknown[0]!r}.")
    install()
    return Subscription(callback, kinds or tuple(one for one in KINDS if one is not Call))
