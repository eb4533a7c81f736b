"""Which thread waits for which, as their stacks show it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import pytest

from safecompile._core.lock import _Hold
from safecompile._core.waits import helpers, waits_for

SECONDS = 30.0
GLOBAL = threading.Event()


def soon(condition: Callable[[], bool]) -> bool:
    """Tell whether the condition comes true: a thread that has begun is not yet where it waits."""
    pause = threading.Event()
    for _ in range(1000):
        if condition():
            return True
        pause.wait(0.001)
    return False


@contextmanager
def running(function: Callable[[], object], end: Callable[[], object] = lambda: None) -> Iterator[int]:
    """Run the function in a thread; what is yielded is its ident. At the end of the block `end` lets it return."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    try:
        assert thread.ident is not None
        yield thread.ident
    finally:
        end()
        thread.join(SECONDS)
        assert not thread.is_alive()


class Other:
    """The thread that may be waited for: it is in `run`, and has a name for a thing only there."""

    def __init__(self, thing: Any = None, *, use: Callable[[Any], object] | None = None) -> None:
        self._ready, self._end = threading.Event(), threading.Event()
        self._thing, self._use = thing, use
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        assert self._ready.wait(SECONDS)

    @property
    def ident(self) -> int:
        assert self.thread.ident is not None
        return self.thread.ident

    def run(self) -> None:
        thing = self._thing
        if self._use is not None:
            self._use(thing)
        self._ready.set()
        assert self._end.wait(SECONDS)

    def end(self) -> None:
        self._end.set()
        self.thread.join(SECONDS)


def full_queue() -> queue.Queue[int]:
    full: queue.Queue[int] = queue.Queue(1)
    full.put(0)
    return full


# How it is made, waited for, and let go.
THINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any], object]]] = {
    "event": (threading.Event, lambda thing: thing.wait(), lambda thing: thing.set()),
    "queue": (queue.Queue, lambda thing: thing.get(), lambda thing: thing.put(1)),
    "full queue": (full_queue, lambda thing: thing.put(1), lambda thing: thing.get()),
    "simple queue": (queue.SimpleQueue, lambda thing: thing.get(), lambda thing: thing.put(1)),
    "semaphore": (lambda: threading.Semaphore(0), lambda thing: thing.acquire(), lambda thing: thing.release()),
    "barrier": (lambda: threading.Barrier(2), lambda thing: thing.wait(), lambda thing: thing.wait()),
}


@pytest.mark.parametrize("name", THINGS)
def test_a_wait_for_a_thing_is_one_for_the_threads_that_have_a_name_for_it(name: str) -> None:
    make, wait_for, let_go = THINGS[name]
    thing = make()
    keeper, stranger = Other(thing), Other()
    with running(lambda: wait_for(thing), lambda: let_go(thing)) as waiting:
        assert soon(lambda: waits_for(waiting, keeper.ident))
        assert not waits_for(waiting, stranger.ident)
        assert not waits_for(keeper.ident, waiting)
        assert not waits_for(stranger.ident, waiting)
    keeper.end()
    stranger.end()


def wait_with_a_limit(event: threading.Event) -> None:
    event.wait(SECONDS)


def test_a_wait_with_a_limit_of_its_own_is_none() -> None:
    event = threading.Event()
    keeper = Other(event)
    with running(lambda: wait_with_a_limit(event), event.set) as waiting:
        assert not any(waits_for(waiting, keeper.ident) for _ in range(100))
    keeper.end()


def use_global() -> None:
    GLOBAL.is_set()
    assert GO_ON.wait(SECONDS)


GO_ON = threading.Event()


def test_a_global_that_a_function_uses_is_a_name() -> None:
    GLOBAL.clear()
    GO_ON.clear()
    with running(use_global, GO_ON.set) as ident, running(GLOBAL.wait, GLOBAL.set) as waiting:
        assert soon(lambda: waits_for(waiting, ident))


class Holder:
    def __init__(self, lock: Any) -> None:
        self.lock, self.has_it, self.go_on = lock, threading.Event(), threading.Event()

    def hold(self) -> None:
        with self.lock:
            self.has_it.set()
            assert self.go_on.wait(SECONDS)

    def want(self) -> None:
        with self.lock:
            pass


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock, threading.Condition])
def test_a_wait_for_a_lock_is_one_for_its_holder(make: Callable[[], Any]) -> None:
    holder, stranger = Holder(make()), Other()
    with running(holder.hold, holder.go_on.set) as holding:
        assert holder.has_it.wait(SECONDS)
        with running(holder.want, holder.go_on.set) as waiting:
            assert soon(lambda: waits_for(waiting, holding))
            assert not waits_for(waiting, stranger.ident)
            assert not waits_for(holding, waiting)
    stranger.end()


def test_a_thread_that_has_a_name_for_a_reentrant_lock_but_does_not_hold_it_is_not_waited_for() -> None:
    lock = threading.RLock()
    holder, named = Holder(lock), Other(lock)
    with running(holder.hold, holder.go_on.set) as holding:
        assert holder.has_it.wait(SECONDS)
        with running(holder.want, holder.go_on.set) as waiting:
            assert soon(lambda: waits_for(waiting, holding))
            assert not waits_for(waiting, named.ident)
    named.end()


def test_a_free_lock_that_a_busy_thread_has_a_name_for_is_no_wait() -> None:
    done = [False]
    lock = threading.Lock()
    keeper = Other(lock)

    def busy() -> None:
        mine = lock  # noqa: F841  a name
        while not done[0]:
            pass

    with running(busy, lambda: done.__setitem__(0, True)) as ident:
        assert not any(waits_for(ident, keeper.ident) for _ in range(20))
    keeper.end()


def test_a_join_is_a_wait_for_the_thread() -> None:
    other, stranger = Other(), Other()
    with running(other.thread.join, other.end) as waiting:
        assert soon(lambda: waits_for(waiting, other.ident))
        assert not waits_for(waiting, stranger.ident)
    stranger.end()


def test_waits_are_followed_from_thread_to_thread() -> None:
    last = Other()
    first_to_join: list[threading.Thread] = [last.thread]
    for _ in range(3):
        thread = threading.Thread(target=first_to_join[-1].join, daemon=True)
        thread.start()
        first_to_join.append(thread)
    top = first_to_join[-1].ident
    assert top is not None
    assert soon(lambda: waits_for(top, last.ident))
    assert not waits_for(last.ident, top)
    last.end()
    for thread in first_to_join:
        thread.join(SECONDS)


def test_threads_that_wait_for_each_other_end_no_search() -> None:
    one, other = threading.Event(), threading.Event()
    stranger = Other()

    def first() -> None:
        one.wait()
        other.set()

    def second() -> None:
        other.wait()
        one.set()

    with running(first, one.set) as a, running(second, other.set) as b:
        assert soon(lambda: waits_for(a, b) and waits_for(b, a))
        assert not waits_for(a, stranger.ident)
    stranger.end()


@pytest.mark.parametrize("several", [False, True], ids=["result", "wait"])
def test_a_wait_for_a_future_is_one_for_the_thread_that_runs_it(several: bool) -> None:
    go_on, idents = threading.Event(), queue.SimpleQueue[int]()

    def task() -> None:
        idents.put(threading.get_ident())
        assert go_on.wait(SECONDS)

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(task)]
        runs = idents.get()
        pool.submit(task)
        runs_another = idents.get()
        with running((lambda: wait(futures)) if several else futures[0].result, go_on.set) as waiting:
            assert soon(lambda: waits_for(waiting, runs))
            assert not waits_for(waiting, runs_another)


def test_any_wait_of_a_thread_is_one_for_its_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    event, done = threading.Event(), [False]
    helper, stranger = Other(), Other()

    def busy() -> None:
        while not done[0]:
            pass

    with (
        running(lambda: wait_with_a_limit(event), event.set) as waiting,
        running(busy, lambda: done.__setitem__(0, True)) as working,
    ):
        hold = _Hold(waiting, "waiting", 0.0, "compiling")
        monkeypatch.setitem(helpers, helper.ident, hold)
        assert soon(lambda: waits_for(waiting, helper.ident))
        assert not waits_for(waiting, stranger.ident)
        hold.depth = 0  # it has given the lock back
        assert not waits_for(waiting, helper.ident)
        monkeypatch.setitem(helpers, helper.ident, _Hold(working, "working", 0.0, "compiling"))  # but it does not wait
        assert not waits_for(working, helper.ident)
    helper.end()
    stranger.end()


def test_threads_that_have_ended_are_not_waited_for_and_wait_for_nobody() -> None:
    other, ended = Other(), Other()
    ended.end()
    assert not waits_for(ended.ident, other.ident)
    assert not waits_for(other.ident, ended.ident)
    other.end()


def test_objects_of_a_users_with_strange_attributes_do_no_harm() -> None:
    class Strange:
        def __getattribute__(self, name: str) -> Any:
            raise ZeroDivisionError(name)

        def __eq__(self, other: object) -> bool:
            raise ZeroDivisionError

        __hash__ = None  # type: ignore[assignment]

    event = threading.Event()
    keeper = Other(event, use=lambda _: None)
    strange = Other(Strange())
    with running(event.wait, event.set) as waiting:
        assert soon(lambda: waits_for(waiting, keeper.ident))
        assert not waits_for(waiting, strange.ident)
    keeper.end()
    strange.end()
