"""Backends that wait for threads which want to compile (D1): such a wait ends, and no other is taken for one."""

from __future__ import annotations

import concurrent.futures
import pickle
import queue
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest
import torch

import safecompile
from safecompile import LockTimeoutError, WaitCycleError, fx_trace_lock
from safecompile._core import lock as lock_module
from safecompile._core import waits
from tests.helpers.backends import AotCountingBackend, CountingBackend
from tests.helpers.subprocess_run import run_forked
from tests.helpers.threads import run_threads
from tests.helpers.torch_version import ASKS_IN_A_COMPILE, TORCH, lacks

pytestmark = pytest.mark.usefixtures("nothing_compiled")

SECONDS = 60.0

# Torch 2.6 cannot run a frame as it is for once: the caller gets the error.
EAGERLY_ONCE = TORCH >= (2, 7)

Backend = Callable[[torch.fx.GraphModule, Any], Callable[..., Any]]
# Given what the other thread is to do, a case is a block in which a backend can call what it yields: that waits for it.
Case = Callable[[Callable[[], None]], AbstractContextManager[Callable[[], object]]]


@pytest.fixture(autouse=True)
def installed_and_quick(nothing_compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    safecompile.install()
    monkeypatch.setattr(lock_module, "LOOK", 0.005)


# --- how a backend can wait


def in_the_backend(wait_for: Callable[[Callable[[], None]], object]) -> Case:
    """Make a case of what needs nothing before and after the compile."""

    @contextmanager
    def case(task: Callable[[], None]) -> Iterator[Callable[[], object]]:
        yield lambda: wait_for(task)

    return case


def a_thread(task: Callable[[], None]) -> None:
    thread = threading.Thread(target=task)
    thread.start()
    thread.join()


def a_threads_event(task: Callable[[], None]) -> None:
    def do_and_tell() -> None:
        task()
        done.set()

    done = threading.Event()
    threading.Thread(target=do_and_tell).start()
    done.wait()


def a_threads_thread(task: Callable[[], None]) -> None:
    a_thread(lambda: a_thread(task))


def a_future(task: Callable[[], None]) -> None:
    with ThreadPoolExecutor(2) as pool:
        pool.submit(task).result()


def several_futures(task: Callable[[], None]) -> None:
    with ThreadPoolExecutor(2) as pool:
        concurrent.futures.wait([pool.submit(task) for _ in range(2)])


def a_pools_map(task: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        list(pool.map(lambda _: task(), range(2)))


def another_pools_map(task: Callable[[], None]) -> None:
    with ThreadPool(2) as pool:
        pool.map(lambda _: task(), range(2))


@contextmanager
def an_older_pool(task: Callable[[], None]) -> Iterator[Callable[[], object]]:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        yield lambda: pool.submit(task).result()


@contextmanager
def an_older_future(task: Callable[[], None]) -> Iterator[Callable[[], object]]:
    inside = threading.Event()

    def work() -> None:
        assert inside.wait(SECONDS)
        task()

    def wait() -> None:
        inside.set()
        future.result()

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        yield wait


def a_queue_of(make: Callable[[], Any]) -> Case:
    @contextmanager
    def case(task: Callable[[], None]) -> Iterator[Callable[[], object]]:
        tasks, results = make(), make()

        def consume() -> None:
            while (one := tasks.get()) is not None:
                results.put(one())

        def wait() -> None:
            tasks.put(task)
            results.get()

        consumer = threading.Thread(target=consume)
        consumer.start()
        yield wait
        tasks.put(None)
        consumer.join()

    return case


class Owner:
    """Has a lock, as objects that threads share do."""

    def __init__(self, lock: Any) -> None:
        self.lock = lock
        self.has_it, self.go_on = threading.Event(), threading.Event()

    def hold(self, task: Callable[[], None]) -> None:
        with self.lock:
            self.has_it.set()
            assert self.go_on.wait(SECONDS)
            task()

    def want(self) -> None:
        self.go_on.set()
        with self.lock:
            pass


def a_lock_of(make: Callable[[], Any], *, attribute: bool = False) -> Case:
    @contextmanager
    def case(task: Callable[[], None]) -> Iterator[Callable[[], object]]:
        owner = Owner(make())
        lock = owner.lock

        def hold() -> None:
            with lock:
                owner.has_it.set()
                assert owner.go_on.wait(SECONDS)
                task()

        def want() -> None:
            owner.go_on.set()
            with lock:
                pass

        holder = threading.Thread(target=owner.hold if attribute else hold, args=(task,) if attribute else ())
        holder.start()
        assert owner.has_it.wait(SECONDS)
        yield owner.want if attribute else want
        holder.join()

    return case


CASES: dict[str, Case] = {
    "thread": in_the_backend(a_thread),
    "event": in_the_backend(a_threads_event),
    "thread of a thread": in_the_backend(a_threads_thread),
    "future": in_the_backend(a_future),
    "futures": in_the_backend(several_futures),
    "map": in_the_backend(a_pools_map),
    "map of multiprocessing": in_the_backend(another_pools_map),
    "older pool": an_older_pool,
    "older future": an_older_future,
    "Queue": a_queue_of(queue.Queue),
    "SimpleQueue": a_queue_of(queue.SimpleQueue),
    "Lock": a_lock_of(threading.Lock),
    "RLock": a_lock_of(threading.RLock),
    "attribute": a_lock_of(threading.Lock, attribute=True),
}


def waiting_backend(wait: Callable[[], object]) -> Backend:
    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        wait()
        return graph.forward

    return backend


def compile_and_wait(case: Case, task: Callable[[], None], **options: Any) -> None:
    """Compile, with a backend that waits for a thread which does the task, and check the result."""
    with case(task) as wait:
        outer = torch.compile(lambda x: x + 1, backend=waiting_backend(wait), **options)
        assert torch.equal(outer(torch.ones(3)), torch.full((3,), 2.0))


# --- waits that cannot end


@pytest.mark.parametrize("fullgraph", [False, True], ids=["", "fullgraph"])
@pytest.mark.parametrize("name", CASES)
def test_a_call_that_the_compile_waits_for_runs_eagerly_once_with_a_warning_that_names_both_threads(
    name: str, fullgraph: bool
) -> None:
    backend, x = CountingBackend(), torch.ones(3)
    inner = torch.compile(lambda x: x.sin() * 2, backend=backend, fullgraph=fullgraph)
    outcomes: list[tuple[str, Any]] = []

    def task() -> None:
        thread = threading.current_thread().name
        try:
            outcomes.append((thread, inner(x)))
        except BaseException as error:
            outcomes.append((thread, error))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compile_and_wait(CASES[name], task, fullgraph=fullgraph)
    assert outcomes and all(isinstance(got, torch.Tensor if EAGERLY_ONCE else WaitCycleError) for _, got in outcomes)
    assert not EAGERLY_ONCE or all(torch.equal(got, x.sin() * 2) for _, got in outcomes)
    told = [warning.message for warning in caught] if EAGERLY_ONCE else [got for _, got in outcomes]
    texts = [str(one).partition("\n")[0] for one in told]
    assert len(texts) == len(outcomes), texts
    for thread, _ in outcomes:
        assert any(f"thread {thread!r}" in text for text in texts), texts
    for one, text in zip(told, texts, strict=True):
        assert isinstance(one, RuntimeWarning if EAGERLY_ONCE else WaitCycleError)
        assert "runs eagerly, this once" in text or not EAGERLY_ONCE
        assert f"thread {threading.current_thread().name!r} has held" in text
    assert backend.count == 0
    assert torch.equal(inner(x), x.sin() * 2) and backend.count == 1  # and now it can be compiled
    assert not torch.compiler.is_compiling()
    assert fx_trace_lock.statistics().locked is False


@lacks((2, 7), "a frame that is run as it is for once")
@pytest.mark.filterwarnings("always:.*runs eagerly, this once:RuntimeWarning")
def test_a_call_that_the_compile_of_a_backward_waits_for_runs_eagerly() -> None:
    inner = torch.compile(lambda x: x.sin() * 2, backend="eager")
    backend, x = AotCountingBackend(), torch.ones(3, requires_grad=True)
    got: list[torch.Tensor] = []

    def record(_: torch.fx.GraphModule) -> None:
        a_thread(lambda: got.append(inner(torch.ones(3))))

    backend.backward.record = record  # type: ignore[assignment, method-assign]
    y = torch.compile(lambda x: x.sin(), backend=backend)(x)
    with pytest.warns(RuntimeWarning, match="runs eagerly, this once"):
        y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, x.detach().cos())
    assert torch.equal(got[0], torch.ones(3).sin() * 2)


@pytest.mark.parametrize("name", ["thread", "older future", "attribute"])
def test_control_the_wait_never_ends_with_torch_alone(name: str) -> None:
    result = run_forked(
        """
        import os, sys, threading
        import torch
        from tests import test_waits

        def give_up():
            calls.wait(30)
            main.join(1.5)
            print("waits for ever" if calls.is_set() and main.is_alive() else "no", flush=True)
            os._exit(0)

        def task():
            calls.set()
            inner(torch.ones(3))

        calls, main = threading.Event(), threading.main_thread()
        inner = torch.compile(lambda x: x.sin() * 2, backend="eager")
        threading.Thread(target=give_up, daemon=True).start()
        test_waits.compile_and_wait(test_waits.CASES[sys.argv[1]], task)
        print("it ends", flush=True)
        os._exit(0)
        """,
        [name],
    ).check()
    assert result.stdout == "waits for ever\n"


def test_taking_the_lock_in_a_thread_that_the_compile_waits_for_is_an_error() -> None:
    errors: list[tuple[int, BaseException]] = []

    def task() -> None:
        try:
            fx_trace_lock.acquire()
        except BaseException as error:
            errors.append((threading.get_ident(), error))

    compile_and_wait(CASES["thread"], task)
    ((ident, error),) = errors
    assert isinstance(error, WaitCycleError) and isinstance(error, LockTimeoutError)
    assert error.waiter == ident
    assert "The holder's stack" in str(error) and "in a_thread" in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.waiter) == (WaitCycleError, str(error), ident)


def test_an_own_time_limit_in_a_thread_that_the_compile_waits_for_passes() -> None:
    taken: list[bool] = []
    compile_and_wait(CASES["thread"], lambda: taken.append(fx_trace_lock.acquire(timeout=0.05)))
    assert taken == [False]


def test_a_wait_that_cannot_be_seen_ends_at_the_limit_with_the_holders_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fx_trace_lock, "limit", 0.1)
    inner = torch.compile(lambda x: x.sin(), backend="eager")
    errors: list[BaseException] = []

    def task() -> None:
        try:
            inner(torch.ones(3))
        except BaseException as error:
            errors.append(error)
        done.append(True)

    @contextmanager
    def an_older_thread_looked_at(task: Callable[[], None]) -> Iterator[Callable[[], object]]:
        def begin_when_told() -> None:
            assert begin.wait(SECONDS)
            task()

        def look_again_and_again() -> None:
            begin.set()
            pause = threading.Event()
            while not done:
                pause.wait(0.001)

        begin = threading.Event()
        thread = threading.Thread(target=begin_when_told)
        thread.start()
        yield look_again_and_again
        thread.join()

    done: list[bool] = []
    compile_and_wait(an_older_thread_looked_at, task)
    (error,) = errors
    assert type(error) is LockTimeoutError, "".join(traceback.format_exception(error))
    assert "look_again_and_again" in str(error) and "fx_trace_lock.limit" in str(error)
    assert torch.equal(inner(torch.ones(3)), torch.ones(3).sin())


# --- waits that end


class Gate:
    """What a compile waits for; only in these methods has the event a name, for threads that name it count as keepers."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def wait(self) -> None:
        self._event.wait()

    def open(self) -> None:
        self._event.set()


def thread_at_the_gate(gate: Gate) -> None:
    a_thread(gate.wait)


def pool_at_the_gate(gate: Gate) -> None:
    a_future(gate.wait)


def queue_behind_the_gate(gate: Gate) -> None:
    results: queue.Queue[None] = queue.Queue()

    def work() -> None:
        gate.wait()
        results.put(None)

    threading.Thread(target=work).start()
    results.get()


def herd_beside_a_slow_compile(
    wait: Callable[[], None], go_on: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], int]:
    """Let three threads look often at what a fourth compiles; return the warnings and how often it was compiled."""
    looks, through, waits_for = Counter[int](), list[int](), waits.waits_for

    def look(waiting: int, other: int) -> bool:
        looks[other] += 1
        return waits_for(waiting, other)

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        compiles.append(threading.get_ident())
        begun.set()
        wait()
        return graph.forward

    def call_later() -> None:  # in the first thread, which the main thread joins first
        assert begun.wait(SECONDS)
        call()

    def end() -> None:
        pause = threading.Event()
        while sum(looks[ident] >= 5 or ident in through for ident in list(looks)) < 3:
            pause.wait(0.001)
        go_on()

    def call() -> None:
        assert torch.equal(f(torch.ones(3)), torch.ones(3).sin())
        through.append(threading.get_ident())

    monkeypatch.setattr(lock_module, "waits_for", look)
    compiles: list[int] = []
    begun = threading.Event()
    f = torch.compile(lambda x: x.sin(), backend=backend)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_threads([call_later, call, call, call, end])
    return [str(warning.message) for warning in caught], len(compiles)


@pytest.mark.parametrize("wait", [Gate.wait, thread_at_the_gate, pool_at_the_gate, queue_behind_the_gate])
def test_threads_that_wait_for_a_slow_compile_go_on_waiting(
    wait: Callable[[Gate], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    assert herd_beside_a_slow_compile(lambda: wait(gate), gate.open, monkeypatch) == ([], 1)


def test_threads_go_on_waiting_also_when_the_main_thread_joins_them_and_knows_the_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    event = threading.Event()
    assert herd_beside_a_slow_compile(lambda: (event.wait(), None)[1], event.set, monkeypatch) == ([], 1)


# --- whether a thread is told that it is part of a compile


@ASKS_IN_A_COMPILE
@pytest.mark.parametrize("name", ["thread", "thread of a thread", "future", "map of multiprocessing", "older pool"])
def test_is_compiling_is_true_in_threads_that_work_for_a_compile(name: str) -> None:
    told: list[bool] = []
    compile_and_wait(CASES[name], lambda: told.append(torch.compiler.is_compiling()))
    assert told and all(told)


@ASKS_IN_A_COMPILE
def test_is_compiling_is_false_in_other_threads_meanwhile() -> None:
    asked, told, end = queue.SimpleQueue[Any](), queue.SimpleQueue[bool](), object()

    def unrelated() -> None:
        while asked.get() is not end:
            told.put(torch.compiler.is_compiling())

    thread = threading.Thread(target=unrelated)
    thread.start()

    def ask() -> None:
        asked.put(None)
        assert told.get() is False

    def ask_a_new_thread() -> None:
        thread = threading.Thread(target=lambda: told.put(torch.compiler.is_compiling()))
        thread.start()
        thread.join()

    def both() -> None:
        ask()
        ask_a_new_thread()
        assert told.get() is True

    torch.compile(lambda x: x + 1, backend=waiting_backend(both))(torch.ones(3))
    asked.put(end)
    thread.join()


@ASKS_IN_A_COMPILE
def test_is_compiling_is_false_in_a_thread_that_outlives_the_compile_which_started_it() -> None:
    told: list[bool] = []
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        told.append(torch.compiler.is_compiling())
        begun.set()
        assert ended.wait(SECONDS)
        told.append(torch.compiler.is_compiling())

    threads = [threading.Thread(target=work)]

    def start() -> None:
        threads[0].start()
        assert begun.wait(SECONDS)

    torch.compile(lambda x: x + 1, backend=waiting_backend(start))(torch.ones(3))
    ended.set()
    threads[0].join()
    assert told == [True, False]


def test_is_compiling_is_false_in_a_thread_that_outlives_its_compile_during_later_compiles() -> None:
    begun, told = threading.Event(), queue.SimpleQueue[Any]()
    asked: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def work() -> None:
        begun.set()
        while asked.get():
            told.put(torch.compiler.is_compiling())

    def start() -> None:
        thread.start()
        assert begun.wait(SECONDS)

    def ask() -> None:
        asked.put(True)
        answers.append(told.get())

    answers: list[bool] = []
    thread = threading.Thread(target=work)
    torch.compile(lambda x: x + 1, backend=waiting_backend(start))(torch.ones(3))
    try:
        torch.compile(lambda x: x + 2, backend=waiting_backend(ask))(torch.ones(3))
    finally:
        asked.put(False)
        thread.join()
    assert answers == [False]


@ASKS_IN_A_COMPILE
def test_a_pools_worker_is_part_of_a_compile_only_in_the_tasks_of_that() -> None:
    told: list[tuple[str, bool, str]] = []

    def task(who: str) -> None:
        told.append((who, torch.compiler.is_compiling(), threading.current_thread().name))

    with ThreadPoolExecutor(1, thread_name_prefix="pool") as pool:  # its only thread is started by the compile

        def submit() -> None:
            pool.submit(task, "compile").result()
            a_thread(lambda: pool.submit(task, "helper of the compile").result())
            unrelated_asks.set()
            assert unrelated_has_asked.wait(SECONDS)

        def unrelated() -> None:
            assert unrelated_asks.wait(SECONDS)
            pool.submit(task, "unrelated").result()
            unrelated_has_asked.set()

        unrelated_asks, unrelated_has_asked = threading.Event(), threading.Event()
        thread = threading.Thread(target=unrelated)
        thread.start()
        torch.compile(lambda x: x + 1, backend=waiting_backend(submit))(torch.ones(3))
        pool.submit(task, "later").result()
        thread.join()
    assert told == [
        ("compile", True, "pool_0"),
        ("helper of the compile", True, "pool_0"),
        ("unrelated", False, "pool_0"),
        ("later", False, "pool_0"),
    ]


def test_threads_and_pools_are_as_before_after_an_uninstallation() -> None:
    safecompile.uninstall()
    told: list[bool] = []
    compile_and_wait(CASES["future"], lambda: told.append(hasattr(threading.Thread.start, "__wrapped__")))
    assert told == [False]
    assert not hasattr(ThreadPoolExecutor.submit, "__wrapped__")


@ASKS_IN_A_COMPILE
def test_control_torch_alone_tells_all_threads_and_none_by_what_they_do() -> None:
    run_forked(
        """
        import torch
        from tests.helpers.backends import CountingBackend
        from tests.helpers.threads import run_threads

        def asks():
            assert backend.entered.wait(30)
            told.append(torch.compiler.is_compiling())
            backend.release.set()

        told, backend = [], CountingBackend(gated=True)
        f = torch.compile(lambda x: x + 1, backend=backend)
        run_threads([asks, lambda: f(torch.ones(3))])
        assert told == [True], told  # in a thread that has nothing to do with the compile
        """
    ).check()


def test_a_task_of_a_compile_may_leave_a_task_to_its_own_pool() -> None:
    """The pool's thread is then no helper of its own."""
    told: list[bool] = []
    pool = ThreadPoolExecutor(1)
    later: list[concurrent.futures.Future[None]] = []

    def leave_a_task() -> None:
        later.append(pool.submit(lambda: told.append(torch.compiler.is_compiling())))

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        pool.submit(leave_a_task).result(30)
        return graph.forward

    with pool:
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
        later[0].result(30)
    assert len(told) == 1


def test_a_look_leaves_no_trace_in_a_functions_variables() -> None:
    """Before Python 3.13 a frame keeps the copy of its variables that somebody has asked for."""
    inside, go_on = threading.Event(), threading.Event()
    changed: list[str] = []

    def shows_its_locals() -> None:
        first = locals()
        names = list(first)
        inside.set()
        go_on.wait(30)
        changed.extend(set(first) ^ set(names))

    thread = threading.Thread(target=shows_its_locals)
    thread.start()
    assert inside.wait(30)
    event = threading.Event()
    waiting = threading.Thread(target=event.wait)
    waiting.start()
    assert waiting.ident is not None and thread.ident is not None
    waits.waits_for(waiting.ident, thread.ident)
    event.set()
    go_on.set()
    for one in (thread, waiting):
        one.join(30)
    assert changed == []
