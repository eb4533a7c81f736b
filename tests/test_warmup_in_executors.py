"""`warmup(executor=)`: each worker exactly once, one before the others; what each thread compiles for itself, and why."""

from __future__ import annotations

import gc
import pickle
import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from safecompile import SafeCompileError, WarmupTimeoutError, fx_trace_lock, thread_safe_compile, warmup
from safecompile._core.rendezvous import in_each_worker
from safecompile.testing import max_compiles, no_compiles
from tests.helpers.backends import AotCountingBackend, CountingBackend
from tests.helpers.subprocess_run import ROOT
from tests.helpers.threads import run_threads, switch_interval, wait_until

pytestmark = pytest.mark.usefixtures("nothing_compiled")

SECONDS = 30.0
WORKERS = 3


def sin_exp(x: Tensor) -> Tensor:
    return x.sin().exp()


def matrix(*size: int, **options: Any) -> Tensor:
    return torch.ones(size or (4, 4), **options)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(WORKERS, "pool") as executor:
        yield executor


def in_all(executor: ThreadPoolExecutor, work: Callable[[], Any]) -> list[Any]:
    """Do the work in all workers, which must be free."""
    return in_each_worker(executor, lambda _: work(), SECONDS)


def start_one(executor: ThreadPoolExecutor) -> None:
    """Start the first worker, and wait until the pool knows that it is free."""
    executor.submit(int).result(SECONDS)
    wait_until(lambda: executor._idle_semaphore._value)


class Busy:
    """Keeps so many workers of a pool at work until `release` is set."""

    def __init__(self, executor: ThreadPoolExecutor, workers: int) -> None:
        self.release = threading.Event()
        begun = threading.Barrier(workers + 1)

        def work() -> None:
            begun.wait(SECONDS)
            assert self.release.wait(SECONDS)

        self.futures = [executor.submit(work) for _ in range(workers)]
        begun.wait(SECONDS)

    def end(self) -> None:
        self.release.set()
        for future in self.futures:
            future.result(SECONDS)


# ---------------------------------------------------------------------------------------------------- each exactly once


@pytest.mark.parametrize("started", ["no worker", "one worker", "all workers"])
def test_each_worker_is_warmed_up_exactly_once(pool: ThreadPoolExecutor, started: str) -> None:
    if started == "one worker":
        start_one(pool)
    elif started == "all workers":
        in_all(pool, int)
    names: list[str] = []
    with switch_interval():
        report = warmup(lambda: names.append(threading.current_thread().name), (), executor=pool)
    assert Counter(names) == Counter(f"pool_{number}" for number in range(WORKERS))
    assert sorted(one.thread for one in report.threads) == sorted(names)
    assert (report.thread, report.graphs) == (threading.current_thread().name, 0)


def test_control_map_gives_an_idle_worker_all_tasks_and_leaves_the_others_cold() -> None:
    f = thread_safe_compile(sin_exp, backend="eager")
    modes = [False, True]  # popped from the end: the first worker has grad

    def initializer() -> None:
        torch.set_grad_enabled(modes.pop())

    with ThreadPoolExecutor(2, "pool", initializer) as pool:

        def inputs() -> Iterator[Tensor]:
            for _ in range(2):
                wait_until(lambda: pool._idle_semaphore._value)  # the worker is done with what came before
                yield matrix(requires_grad=True)

        start_one(pool)
        list(pool.map(f, inputs()))
        with max_compiles(1) as limit:
            in_all(pool, lambda: f(matrix(requires_grad=True)))
        assert [(one.thread, one.reasons) for one in limit.compiles] == [("pool_1", ("grad mode changed",))]


def test_afterwards_such_a_pool_compiles_nothing() -> None:
    f = thread_safe_compile(sin_exp, backend="eager")
    modes = [False, True]
    with ThreadPoolExecutor(2, "pool", lambda: torch.set_grad_enabled(modes.pop())) as pool:
        start_one(pool)
        warmup(f, (matrix(requires_grad=True),), executor=pool)
        with no_compiles():
            in_all(pool, lambda: f(matrix(requires_grad=True)))


def test_one_worker_is_alone_and_the_others_are_there_at_the_same_time(pool: ThreadPoolExecutor) -> None:
    calls: list[int] = []
    others_came = threading.Event()
    at_the_same_time = threading.Barrier(WORKERS - 1)

    def work() -> None:
        calls.append(len(calls))
        if calls == [0]:
            assert not others_came.wait(0.1)
        else:
            others_came.set()
            at_the_same_time.wait(SECONDS)

    warmup(work, (), executor=pool)
    assert len(calls) == WORKERS


def test_workers_are_many_and_sets_modes_and_devices_are_those_of_each() -> None:
    backend = AotCountingBackend()
    f = thread_safe_compile(sin_exp, backend=backend, dynamic=False)
    inputs, devices = [(matrix(requires_grad=True),), (matrix(3),)], ["cpu", "meta"]
    told: list[Any] = []
    reports: list[Any] = []

    def progress(done: int, total: int) -> None:
        told.append((done, total, threading.current_thread().name))

    def serve() -> None:
        for device in devices:
            for mode in (True, False):
                with torch.set_grad_enabled(mode):
                    y = f(torch.ones(4, 4, device=device, requires_grad=True))
                    f(torch.ones(3, device=device))
                if mode:
                    y.sum().backward()

    with ThreadPoolExecutor(6, "pool") as pool:

        def step(x: Tensor) -> Tensor:
            reports.append((threading.current_thread().name, x.device.type))
            y = f(x)
            return y if y.requires_grad or not torch.is_grad_enabled() else y.clone().requires_grad_() * 1

        report = warmup(step, inputs, grad="both", backward=True, devices=devices, executor=pool, progress=progress)
        assert set(Counter(reports).values()) == {4}
        assert [(done, total) for done, total, _ in told] == [(number, 48) for number in range(1, 49)]
        assert set(Counter(name for *_, name in told).values()) == {8}
        assert [one.graphs for one in report.threads] == [8, 0, 0, 0, 0, 0]
        assert report.graphs == backend.forward.count == 8
        with no_compiles():
            in_all(pool, serve)


def test_the_settings_are_those_of_the_workers_and_not_of_the_caller(pool: ThreadPoolExecutor) -> None:
    with torch.no_grad():
        modes: list[bool] = []
        warmup(lambda: modes.append(torch.is_grad_enabled()), (), executor=pool)
    assert modes == [True] * WORKERS


# ---------------------------------------------------------------------------------------------------------- busy pools


@pytest.mark.parametrize("busy", [1, WORKERS])
def test_workers_that_are_too_busy_to_meet_are_a_clear_error(pool: ThreadPoolExecutor, busy: int) -> None:
    backend = CountingBackend()
    f = thread_safe_compile(sin_exp, backend=backend)
    in_all(pool, int)
    others = Busy(pool, busy)
    timeout = 0.2 if busy < WORKERS else 0.0
    with pytest.raises(WarmupTimeoutError) as caught:
        warmup(f, (matrix(),), executor=pool, timeout=timeout)
    text = str(caught.value)
    assert re.match(rf"[0-{WORKERS - busy}] of {WORKERS} workers of the executor met within {timeout:g} s", text)
    assert "Nothing was compiled" in text and "Warm up before it is given work" in text
    left = [pool._work_queue.get_nowait() for _ in range(pool._work_queue.qsize())]
    assert all(task.future.cancelled() for task in left)
    assert len(left) == WORKERS or busy < WORKERS
    # Those who had met are free again, while the others are still at work.
    for _ in range(WORKERS - busy):
        pool.submit(int).result(SECONDS)
    others.end()
    assert len(in_all(pool, int)) == WORKERS
    assert backend.count == 0
    assert warmup(f, (matrix(),), executor=pool).graphs == backend.count == 1


def test_a_pool_that_becomes_free_in_time_is_warmed_up(pool: ThreadPoolExecutor) -> None:
    others = Busy(pool, 2)

    def free_them() -> None:
        wait_until(lambda: pool._work_queue.qsize() >= 2)
        others.end()

    report, _ = run_threads([lambda: warmup(int, (), executor=pool), free_them])
    assert report is not None and len(report.threads) == WORKERS


def test_what_was_called_off_keeps_no_input_alive(pool: ThreadPoolExecutor) -> None:
    others = Busy(pool, WORKERS)
    x = matrix()
    seen = weakref.ref(x)
    with pytest.raises(WarmupTimeoutError):
        warmup(sin_exp, (x,), executor=pool, timeout=0)
    del x
    gc.collect()
    assert seen() is None
    others.end()


def test_the_error_can_be_pickled_and_caught_as_what_it_is() -> None:
    error = pickle.loads(pickle.dumps(WarmupTimeoutError("1 of 2 workers met")))
    assert isinstance(error, (SafeCompileError, TimeoutError))
    assert (type(error), str(error)) == (WarmupTimeoutError, "1 of 2 workers met")


def test_an_interrupted_wait_leaves_nothing_behind(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    others = Busy(pool, 1)
    called: list[int] = []

    class Interrupted(threading.Condition().__class__):  # type: ignore[misc]
        def wait_for(self, predicate: Any, timeout: float | None = None) -> Any:
            if timeout is None:
                return super().wait_for(predicate)
            raise KeyboardInterrupt

    monkeypatch.setattr("safecompile._core.rendezvous.threading.Condition", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        warmup(lambda: called.append(1), (), executor=pool)
    monkeypatch.undo()
    others.end()
    assert len(in_all(pool, int)) == WORKERS
    assert not called


# ---------------------------------------------------------------------------------------------------------- refusals


def test_a_pool_that_was_shut_down_is_refused(pool: ThreadPoolExecutor) -> None:
    pool.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        warmup(int, (), executor=pool)


@pytest.mark.parametrize("cancel", [True, False])
def test_a_pool_that_is_shut_down_while_its_workers_are_to_meet(
    pool: ThreadPoolExecutor, cancel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = Busy(pool, 1)
    submit, submitted, called = pool.submit, list[Any](), list[int]()

    def counted(*task: Any) -> Any:
        submitted.append(submit(*task))
        return submitted[-1]

    monkeypatch.setattr(pool, "submit", counted)

    def shut_down() -> None:
        wait_until(lambda: len(submitted) == WORKERS)
        pool.shutdown(wait=False, cancel_futures=cancel)
        if not cancel:
            others.end()

    def warm() -> None:
        if cancel:
            with pytest.raises(RuntimeError, match=r"[012] of 3 workers of the executor met: then it was shut down"):
                warmup(lambda: called.append(1), (), executor=pool)
        else:
            warmup(lambda: called.append(1), (), executor=pool)

    run_threads([warm, shut_down])
    others.end()
    assert len(called) == (0 if cancel else WORKERS)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_pool_whose_initializer_fails_is_refused_at_once() -> None:
    outcomes = [0, 1]

    def fail_later() -> None:
        assert outcomes.pop()

    with ThreadPoolExecutor(2, "pool", fail_later) as pool:
        start_one(pool)
        with pytest.raises(RuntimeError, match="initializer"):
            warmup(int, (), executor=pool, timeout=SECONDS)


def test_a_worker_of_the_pool_cannot_warm_it_up(pool: ThreadPoolExecutor) -> None:
    future = pool.submit(warmup, int, (), executor=pool)
    with pytest.raises(RuntimeError, match="in a worker of the executor"):
        future.result(SECONDS)


def test_a_worker_of_another_pool_can_warm_it_up(pool: ThreadPoolExecutor) -> None:
    with ThreadPoolExecutor(1) as other:
        assert len(other.submit(warmup, int, (), executor=pool).result(SECONDS).threads) == WORKERS


def test_a_pool_is_not_warmed_up_while_the_lock_is_held_for_which_it_would_wait(pool: ThreadPoolExecutor) -> None:
    with fx_trace_lock, pytest.raises(RuntimeError, match="with the FX-trace lock"):
        warmup(int, (), executor=pool)


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_a_time_limit_that_is_none_is_refused(pool: ThreadPoolExecutor, timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout must be at least 0 seconds"):
        warmup(int, (), executor=pool, timeout=timeout)


def test_no_time_limit_is_too_long(pool: ThreadPoolExecutor) -> None:
    assert len(warmup(int, (), executor=pool, timeout=float("inf")).threads) == WORKERS


def test_a_pool_of_processes_is_refused() -> None:
    with ProcessPoolExecutor(1) as pool, pytest.raises(TypeError, match="not ProcessPoolExecutor"):
        warmup(int, (), executor=pool)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------- failures


def test_an_error_in_the_first_worker_reaches_the_caller_and_the_others_call_nothing(pool: ThreadPoolExecutor) -> None:
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        warmup(fail, (), executor=pool)
    assert len(calls) == 1
    assert "fail" in [entry.name for entry in caught.traceback]
    assert len(in_all(pool, int)) == WORKERS


def test_the_first_error_in_another_worker_reaches_the_caller_when_all_have_ended_what_they_are_at(
    pool: ThreadPoolExecutor,
) -> None:
    calls: list[tuple[str, int]] = []
    both, ended = threading.Barrier(2), list[str]()

    def work(number: int) -> None:
        name = threading.current_thread().name
        calls.append((name, number))
        if name == calls[0][0]:
            return
        if both.wait(SECONDS) == 0:
            raise ZeroDivisionError
        wait_until(lambda: pool._idle_semaphore._value >= 2)  # the others are through
        ended.append(name)

    with pytest.raises(ZeroDivisionError):
        warmup(work, [(1,), (2,)], executor=pool)
    assert len(ended) == 1
    assert [number for _, number in calls] == [1, 2, 1, 1]
    assert len(in_all(pool, int)) == WORKERS


def test_an_error_of_progress_in_a_worker_reaches_the_caller(pool: ThreadPoolExecutor) -> None:
    def progress(done: int, total: int) -> None:
        raise ZeroDivisionError(threading.current_thread().name)

    with pytest.raises(ZeroDivisionError, match="pool_"):
        warmup(int, (), executor=pool, progress=progress)


def test_progress_is_told_by_one_thread_at_a_time(pool: ThreadPoolExecutor) -> None:
    inside: list[int] = []
    others_came = threading.Event()

    def progress(done: int, total: int) -> None:
        inside.append(done)
        if len(inside) > 1:
            others_came.set()
        elif done > 1:  # the others have begun as well
            others_came.wait(0.1)
        inside.remove(done)

    warmup(int, (), executor=pool, progress=progress)
    assert not others_came.is_set()


# ---------------------------------------------------------------------------------------------------------- variants


def without_grad() -> None:
    torch.set_grad_enabled(False)


def with_autocast() -> None:
    torch.set_autocast_enabled("cpu", True)


def with_more_threads() -> None:
    torch.set_num_threads(torch.get_num_threads() + 2)


def with_a_default_device() -> None:
    torch.set_default_device("meta")


SETTINGS = {
    without_grad: "grad mode changed",
    with_autocast: r"autocast|Autocast",
    with_more_threads: "num threads changed",
    with_a_default_device: "default device",
}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda one: one.__name__)
def test_a_worker_with_another_setting_compiles_a_variant_and_the_report_says_why(setting: Callable[[], None]) -> None:
    f = thread_safe_compile(sin_exp, backend="eager", dynamic=False)
    x, y, threads = matrix(requires_grad=True), matrix(3, requires_grad=True), torch.get_num_threads()
    plain = threading.Barrier(2)

    def initializer() -> None:
        torch.get_num_threads()  # a thread's first use of torch takes over the process's number
        if plain.wait(SECONDS) == 0:
            plain.wait(SECONDS)
            setting()
        else:
            plain.wait(SECONDS)

    try:
        with ThreadPoolExecutor(2, "pool", initializer) as pool:
            report = warmup(f, [(x,), (y,)], executor=pool)
            first, second = report.threads
            assert (report.graphs, first.graphs, second.graphs) == (4, 2, 2)
            assert first.variants == ()
            for variant in second.variants:
                assert (variant.function, variant.thread) == ("sin_exp", second.thread)
                assert re.search(SETTINGS[setting], variant.reasons[0])
            assert second.compile_seconds == sum(one.seconds for one in second.variants)
            place = f"variant of sin_exp ({__file__}:{sin_exp.__code__.co_firstlineno}): "
            assert str(report).count(place + second.variants[0].reasons[0]) == 2
            with no_compiles():
                in_all(pool, lambda: (f(x), f(y)))
    finally:
        torch.set_num_threads(threads)


def test_control_workers_with_the_same_settings_have_no_variants(pool: ThreadPoolExecutor) -> None:
    f = thread_safe_compile(sin_exp, backend="eager", dynamic=False)
    report = warmup(f, [(matrix(),), (matrix(3),)], executor=pool)
    assert [(one.graphs, one.variants) for one in report.threads] == [(2, ()), (0, ()), (0, ())]
    assert str(report).count("nothing compiled") == 2


def test_two_workers_with_the_same_other_setting_share_a_variant_and_one_waits_for_it() -> None:
    backend = AotCountingBackend()
    f = thread_safe_compile(sin_exp, backend=backend)
    together = threading.Barrier(2)
    names: set[str] = set()

    def step(x: Tensor) -> Tensor:
        first = not names
        names.add(threading.current_thread().name)
        if not first:
            together.wait(SECONDS)
        with torch.set_grad_enabled(first):
            return f(x)

    with ThreadPoolExecutor(3, "pool") as pool:
        report = warmup(step, (matrix(requires_grad=True),), executor=pool)
        assert report.threads[0].graphs == 1
        assert sorted(len(one.variants) for one in report.threads) == [0, 0, 1]
        assert backend.forward.count == report.graphs == 2


def test_what_other_threads_compile_for_others_meanwhile_is_not_counted(pool: ThreadPoolExecutor) -> None:
    f = thread_safe_compile(sin_exp, backend="eager")
    outside = thread_safe_compile(lambda x: x.cos(), backend="eager")

    def step(x: Tensor) -> Tensor:
        run_threads([lambda: outside(x)])
        return f(x)

    with max_compiles(2) as limit:
        report = warmup(step, (matrix(),), executor=pool)
    assert len(limit.compiles) == 2
    assert (report.graphs, [one.variants for one in report.threads]) == (1, [(), (), ()])


# ---------------------------------------------------------------------------------------------------------- docs


def test_the_example_in_the_docs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/warmup.md").read_text(), re.DOTALL)
    program = program.replace("dynamic=False)", "dynamic=False, backend='aot_eager')")
    exec(compile(program, "docs/warmup.md", "exec"), {})
    assert "warm-up: 2 graphs compiled" in capsys.readouterr().out


@pytest.mark.gpu
def test_workers_are_warmed_up_for_each_gpu_and_the_backwards_are_counted(pool: ThreadPoolExecutor) -> None:
    f = thread_safe_compile(sin_exp, backend="aot_eager")
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    current: set[Any] = set()

    def step(x: Tensor) -> Tensor:
        current.add((x.get_device(), torch.cuda.current_device()))
        return f(x)

    with max_compiles(2 * len(devices)) as limit:
        report = warmup(step, (matrix(requires_grad=True),), backward=True, devices=devices, executor=pool)
    assert [one.kind for one in limit.compiles].count("backward") == len(devices)
    assert report.graphs == len(devices)
    assert report.threads[0].compile_seconds == pytest.approx(sum(one.seconds for one in limit.compiles))
    assert current == {(index, index) for index in range(len(devices))}
    with no_compiles():
        in_all(pool, lambda: [f(matrix(device=one, requires_grad=True)).sum().backward() for one in devices])
