"""``safecompile.testing.lock_order``: locks that are taken in opposite orders are found although no threads meet."""

# ruff: noqa: PT012  the end of the block is part of what raises
from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import safecompile
from safecompile.testing import LockOrder, LockOrderError, lock_order
from tests.helpers.threads import gather_threads


@pytest.fixture(autouse=True)
def _uninstalled() -> Iterator[None]:
    yield
    safecompile.uninstall()


def take(*locks: Any) -> None:
    with ExitStack() as held:
        for lock in locks:
            held.enter_context(lock)


def in_a_thread(*locks: Any) -> BaseException | None:
    (outcome,) = gather_threads([lambda: take(*locks)])
    return outcome if isinstance(outcome, BaseException) else None


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock], ids=["Lock", "RLock"])
def test_opposite_orders_are_found_in_whatever_threads_they_are(make: object) -> None:
    with pytest.raises(LockOrderError, match=r"takes the lock made in .*while it holds"), lock_order():
        first, second = (getattr(threading, "Lock" if make is threading.Lock else "RLock")() for _ in range(2))
        assert in_a_thread(first, second) is None
        take(second, first)


def test_an_order_over_three_locks_is_found() -> None:
    with pytest.raises(LockOrderError), lock_order():
        a, b, c = (threading.Lock() for _ in range(3))
        take(a, b)
        take(b, c)
        take(c, a)


def test_one_order_in_all_threads_is_no_error() -> None:
    with lock_order():
        a, b, c = (threading.Lock() for _ in range(3))
        assert [in_a_thread(a, b), in_a_thread(b, c), in_a_thread(a, c)] == [None, None, None]
        take(a, c)


def test_a_reentrant_lock_may_be_taken_again_under_another() -> None:
    with lock_order():
        outer, inner = threading.RLock(), threading.Lock()
        take(outer, inner, outer)


def test_a_try_without_waiting_is_no_wait() -> None:
    with lock_order():
        a, b = threading.Lock(), threading.Lock()
        take(a, b)
        with b:
            assert a.acquire(blocking=False)
            a.release()


def test_an_error_in_another_thread_comes_up_at_the_end() -> None:
    with pytest.raises(LockOrderError), lock_order():
        a, b = threading.Lock(), threading.Lock()
        take(a, b)
        assert isinstance(in_a_thread(b, a), LockOrderError)


def test_a_lock_taken_by_a_backend_and_around_a_call_is_found_with_one_thread() -> None:
    """The deadlock of one thread that calls under its lock, and one whose compile takes that lock."""
    with pytest.raises(LockOrderError, match="fx_trace_lock"), lock_order():
        mine = threading.Lock()

        def backend(graph: torch.fx.GraphModule, _: object) -> object:
            with mine:
                return graph.forward

        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
        with mine:
            torch.compile(lambda x: x + 2, backend="eager")(torch.ones(2))


def test_locks_that_exist_already_can_be_watched() -> None:
    made = threading.Lock(), threading.Lock()
    with pytest.raises(LockOrderError, match="takes a while it holds b"), lock_order() as order:
        a, b = order.watch(made[0], "a"), order.watch(made[1], "b")
        take(a, b)
        take(b, a)


def test_conditions_events_and_queues_made_inside_work() -> None:
    with lock_order() as order:
        box: queue.Queue[int] = queue.Queue()
        ready, condition = threading.Event(), threading.Condition()

        def consumer() -> int:
            with condition:
                ready.set()
                assert condition.wait(30)
            return box.get(timeout=30)

        def producer() -> None:
            assert ready.wait(30)
            with condition:
                condition.notify()
            box.put(3)

        assert gather_threads([consumer, producer]) == [3, None]
        order.check()


def test_everything_is_put_back() -> None:
    lock, rlock, acquire = threading.Lock, threading.RLock, type(safecompile.fx_trace_lock).acquire
    with lock_order():
        assert threading.Lock is not lock
    assert (threading.Lock, threading.RLock) == (lock, rlock)
    assert type(safecompile.fx_trace_lock).acquire is acquire


def test_the_error_pickles() -> None:
    error = pickle.loads(pickle.dumps(LockOrderError("a before b")))
    assert (type(error), str(error)) == (LockOrderError, "a before b")
    assert isinstance(error, AssertionError)
    LockOrder().check()
