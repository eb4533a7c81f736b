"""The gate, in a simulation of Dynamo's cache without torch: by schedules, by hypothesis and by a model checker.

What is simulated is what torch does: look in the cache without a lock; on a miss wait for the compile lock; compile
without looking again; give the lock back; and insert the entry a moment later.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from safecompile._core import gate as gate_module
from safecompile._core.gate import Gate, LookAgain
from safecompile._core.lock import FXTraceLock
from tests.helpers.threads import run_threads, switch_interval

SECONDS = 30.0


class Code:
    """Stands for a code object: hashable, weakly referenced."""


class CompileError(Exception):
    pass


class InsertionError(Exception):
    pass


def nothing(*_: Any) -> None:
    pass


class Simulation:
    """Dynamo's cache for any number of functions, with a gate, and with places where a test can step in."""

    def __init__(self, gate: Gate | None = None, lock: Any = None) -> None:
        self.gate = gate or Gate()
        self.gate.open()
        self.lock = lock or threading.RLock()
        self.entries: set[Hashable] = set()
        self.compiles: list[Hashable] = []
        self.codes: dict[str, Code] = {name: Code() for name in "fg"}
        self.missed: Callable[[Hashable], None] = nothing
        """Called after a look in the cache that failed, before waiting for the lock."""
        self.compiling: Callable[[Hashable], None] = nothing
        """Called with the lock held; what it raises is a failed compile."""
        self.inserting: Callable[[Hashable], None] = nothing
        """Called after the lock was given back, before the insertion; what it raises is a failed insertion."""

    def call(self, key: Hashable = "key", function: str = "f") -> Hashable:
        """Call as the guarded wrapper does."""
        entry = (function, key)
        while True:
            seen = self.gate.epoch
            if entry in self.entries:
                return key
            self.missed(entry)
            try:
                self.compile(entry, self.codes[function], seen)
            except LookAgain:
                continue
            return key

    def compile(self, entry: Hashable, code: Code, seen: int) -> None:
        inserted = [False]
        with self.lock:
            if not self.gate.admit(code, seen):
                raise LookAgain
            self.compiles.append(entry)
            self.compiling(entry)
            self.gate.finish(code, lambda: inserted[0])
        self.inserting(entry)
        self.entries.add(entry)
        inserted[0] = True


def locked_by(raw: Any, **options: float) -> FXTraceLock:
    return FXTraceLock(lambda: raw, **options)


@pytest.fixture
def quick_insertion_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "INSERTION_LIMIT", 0.01)


# ---------------------------------------------------------------------------------------------------------- schedules


def test_a_warm_call_touches_no_lock() -> None:
    class Untouchable:
        def __enter__(self) -> None:
            raise AssertionError("a warm call took the lock")

        def __exit__(self, *_: object) -> None:
            pass

    simulation = Simulation()
    simulation.call()
    simulation.lock = Untouchable()
    before = vars(simulation.gate).copy()
    assert simulation.call() == "key"
    assert vars(simulation.gate) == before


def test_threads_that_all_missed_compile_once() -> None:
    simulation = Simulation()
    all_missed = threading.Barrier(8)
    first = threading.local()

    def missed(_: Hashable) -> None:
        if not getattr(first, "was", False):
            first.was = True
            all_missed.wait(SECONDS)

    simulation.missed = missed
    run_threads(lambda _: simulation.call(), 8)
    assert simulation.compiles == [("f", "key")]
    assert simulation.gate.compiled == 1
    assert simulation.gate.looked_again == 7


def test_a_thread_that_gets_the_lock_before_the_insertion_waits_for_it() -> None:
    """The hole between giving the lock back and inserting: the second thread is let into it."""
    simulation = Simulation()
    may_insert, in_the_hole, second_missed = threading.Event(), threading.Event(), threading.Event()

    def inserting(_: Hashable) -> None:
        in_the_hole.set()
        assert may_insert.wait(SECONDS)

    def second() -> Hashable:
        assert in_the_hole.wait(SECONDS)
        simulation.missed = lambda _: second_missed.set()
        return simulation.call()

    def let_insert() -> None:
        assert second_missed.wait(SECONDS)
        # The second thread holds the lock now, and asks whether the entry is there.
        while simulation.lock.acquire(blocking=False):
            simulation.lock.release()
        may_insert.set()

    simulation.inserting = inserting
    run_threads([simulation.call, second, let_insert])
    assert simulation.compiles == [("f", "key")]


def test_another_key_of_the_same_code_is_compiled_though_it_was_turned_away() -> None:
    simulation = Simulation()
    both_missed = threading.Barrier(2)
    once = threading.local()

    def missed(_: Hashable) -> None:
        if not getattr(once, "was", False):
            once.was = True
            both_missed.wait(SECONDS)

    simulation.missed = missed
    run_threads([lambda: simulation.call(1), lambda: simulation.call(2)])
    assert sorted(simulation.compiles, key=str) == [("f", 1), ("f", 2)]
    assert simulation.gate.looked_again == 1


def test_another_code_is_not_turned_away() -> None:
    simulation = Simulation()
    both_missed = threading.Barrier(2)

    def missed(_: Hashable) -> None:
        both_missed.wait(SECONDS)

    simulation.missed = missed
    run_threads([lambda: simulation.call(function="f"), lambda: simulation.call(function="g")])
    assert simulation.gate.looked_again == 0
    assert len(simulation.compiles) == 2


def test_a_compile_inside_a_compile_is_admitted() -> None:
    """A backend that calls a guarded callable, cold and then warm, in the midst of a compile."""
    simulation = Simulation(lock=locked_by(threading.RLock()))

    def compiling(entry: Hashable) -> None:
        if entry == ("f", "key"):
            assert simulation.call("inner", "g") == "inner"
            assert simulation.call("inner", "g") == "inner"

    simulation.compiling = compiling
    simulation.call()
    assert simulation.compiles == [("f", "key"), ("g", "inner")]


def test_a_compile_of_the_same_code_inside_its_own_compile_is_admitted() -> None:
    simulation = Simulation()

    def compiling(entry: Hashable) -> None:
        if entry == ("f", "key"):
            simulation.call("inner")

    simulation.compiling = compiling
    simulation.call()
    assert simulation.compiles == [("f", "key"), ("f", "inner")]


@pytest.mark.parametrize("failures", [1, 3])
def test_after_a_failed_compile_the_others_try(failures: int) -> None:
    simulation = Simulation()
    all_missed = threading.Barrier(4)
    once, left = threading.local(), [failures]

    def missed(_: Hashable) -> None:
        if not getattr(once, "was", False):
            once.was = True
            all_missed.wait(SECONDS)

    def compiling(_: Hashable) -> None:
        if left[0]:
            left[0] -= 1
            raise CompileError

    def work(_: int) -> Hashable:
        try:
            return simulation.call()
        except CompileError:
            return "failed"

    simulation.missed, simulation.compiling = missed, compiling
    assert Counter(run_threads(work, 4)) == Counter({"failed": failures, "key": 4 - failures})
    assert len(simulation.compiles) == failures + 1
    assert simulation.gate.compiled == 1


@pytest.mark.usefixtures("quick_insertion_limit")
def test_a_failed_insertion_does_not_block_the_others() -> None:
    simulation = Simulation()
    left = [1]

    def inserting(_: Hashable) -> None:
        if left[0]:
            left[0] -= 1
            raise InsertionError

    def work(_: int) -> Hashable:
        try:
            return simulation.call()
        except InsertionError:
            return "failed"

    simulation.inserting = inserting
    assert Counter(run_threads(work, 4)) == Counter({"failed": 1, "key": 3})
    assert len(simulation.compiles) == 2


def test_a_failed_insertion_does_not_make_its_own_thread_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation()

    def fail(_: Hashable) -> None:
        raise InsertionError

    simulation.inserting = fail
    with pytest.raises(InsertionError):
        simulation.call()
    simulation.inserting = nothing
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits for itself"))
    assert simulation.call() == "key"
    assert len(simulation.compiles) == 2


def test_an_epoch_noted_in_the_hole_does_not_admit_a_second_compile() -> None:
    gate, code, there = Gate(), Code(), [False]
    first = gate.open()
    gate.finish(code, lambda: there[0])
    assert gate.epoch == first, "the epoch tells of an entry that nobody can see yet"
    there[0] = True
    run_threads([lambda: gate.admit(code, first)])
    assert gate.epoch > first
    assert gate.admit(code, gate.epoch)


def test_closing_and_opening_again_never_repeats_an_epoch() -> None:
    gate, code = Gate(), Code()
    epochs = [gate.open()]
    gate.finish(code, lambda: True)
    gate.close()
    assert gate.epoch == 0
    gate.admit(code, epochs[0])
    assert gate.epoch == 0, "asking for admission has opened a closed gate"
    epochs.append(gate.open())
    epochs.append(gate.open())
    assert epochs == sorted(set(epochs)) and epochs[0] >= 1
    assert gate.admit(code, epochs[1])


def test_a_new_code_at_the_address_of_an_old_one_is_unknown() -> None:
    gate = Gate()
    seen = gate.open()
    for _ in range(200):
        code = Code()
        assert gate.admit(code, seen), "the record of a code object that is gone was taken for this one's"
        gate.finish(code, lambda: True)
        assert not gate.admit(code, seen)
        del code
    gc.collect()
    assert not gate._finished


def test_counts_are_by_thread() -> None:
    simulation = Simulation()

    def work(index: int) -> int:
        me = threading.get_ident()
        before = simulation.gate.compiled_by(me)
        for key in range(index + 1):
            simulation.call((index, key))
        return simulation.gate.compiled_by(me) - before

    assert run_threads(work, 4) == [1, 2, 3, 4]
    assert simulation.gate.compiled == 10


@pytest.mark.parametrize("functions", ["f", "fg"])
def test_threads_at_full_speed_compile_each_key_once(functions: str) -> None:
    for _ in range(20):
        simulation = Simulation(lock=locked_by(threading.RLock()))

        def work(index: int, simulation: Simulation = simulation) -> None:
            for step in range(20):
                simulation.call((index + step) % 5, functions[step % len(functions)])

        with switch_interval():
            run_threads(work, 6)
        assert set(Counter(simulation.compiles).values()) == {1}
        assert len(simulation.compiles) == 5 * len(functions)


# ---------------------------------------------------------------------------------------------------------- wrong gates


class GateWithoutEpochs(Gate):
    def admit(self, code: Any, seen: int) -> bool:
        return True


class GateThatPublishesAtFinish(Gate):
    """Advances the epoch when an entry is finished, and not when it is in the cache."""

    def finish(self, code: Any, inserted: Callable[[], bool]) -> None:
        super().finish(code, inserted)
        self._pending.clear()
        self.epoch = self._serial


class GateThatDoesNotWaitForInsertions(Gate):
    def finish(self, code: Any, inserted: Callable[[], bool]) -> None:
        super().finish(code, lambda: True)


# ---------------------------------------------------------------------------------------------------------- hypothesis


class Suspended:
    """A thread of a simulation, which stops at each place where another may come in, and goes on when told."""

    def __init__(self, simulation: Simulation, key: Hashable, function: str, fails: str) -> None:
        self.fails = fails
        self.at = "start"
        self.error: Exception | None = None
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)

        def run() -> None:
            _current.thread = self
            self.stop("start")
            try:
                simulation.call(key, function)
            except (CompileError, InsertionError) as error:
                self.error = error
            self.at = "end"
            self._stopped.release()

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        assert self._stopped.acquire(timeout=SECONDS)

    def stop(self, where: str) -> None:
        self.at = where
        self._stopped.release()
        assert self._go.acquire(timeout=SECONDS)

    def step(self) -> None:
        self._go.release()
        assert self._stopped.acquire(timeout=SECONDS), f"the thread hangs after {self.at!r}"


_current = threading.local()


def suspendable(gate: Gate) -> Simulation:
    simulation = Simulation(gate)
    simulation.missed = lambda _: _current.thread.stop("missed")

    def compiling(_: Hashable) -> None:
        _current.thread.stop("compiling")
        if _current.thread.fails == "compile":
            raise CompileError

    def inserting(_: Hashable) -> None:
        _current.thread.stop("inserting")
        if _current.thread.fails == "insertion":
            raise InsertionError

    simulation.compiling, simulation.inserting = compiling, inserting
    return simulation


calls = st.tuples(st.integers(0, 1), st.sampled_from("fg"), st.sampled_from(["", "", "", "", "compile", "insertion"]))


def run_schedule(
    gate: Gate, wanted: list[tuple[int, str, str]], choices: list[int], *, into_the_hole: bool = False
) -> tuple[Simulation, list[Suspended]]:
    """Run calls on threads of their own, one step of one thread at a time, in the order that `choices` gives."""
    simulation = suspendable(gate)
    threads = [Suspended(simulation, key, function, fails) for key, function, fails in wanted]
    order = iter(choices + [0] * 1000)
    for _ in range(40 * len(threads)):
        holder = next((thread for thread in threads if thread.at == "compiling"), None)
        # A thread that would have to wait for the lock or for an insertion is not chosen, as nothing else would run.
        hole = not into_the_hole and any(thread.at == "inserting" for thread in threads)
        ready = [
            thread
            for thread in threads
            if thread.at in ("start", "compiling", "inserting")
            or (thread.at == "missed" and holder is None and not hole)
        ]
        if not ready:
            break
        ready[next(order) % len(ready)].step()
    assert [thread.at for thread in threads] == ["end"] * len(threads), "some call loops for ever"
    return simulation, threads


@settings(max_examples=60, deadline=None, database=None)
@given(wanted=st.lists(calls, min_size=2, max_size=5), choices=st.lists(st.integers(0, 4), max_size=40))
def test_in_any_order_of_steps_each_key_is_compiled_once(
    wanted: list[tuple[int, str, str]], choices: list[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            gate_module, "INSERTION_LIMIT", 0.001
        )  # nobody is let into the hole: only failures are waited for
        simulation, threads = run_schedule(Gate(), wanted, choices)
    failed: Counter[Hashable] = Counter(
        (function, key) for (key, function, _), thread in zip(wanted, threads, strict=True) if thread.error is not None
    )
    for entry, count in Counter(simulation.compiles).items():
        assert count == failed[entry] + (entry in simulation.entries), f"{entry} was compiled {count} times"
    for (key, function, fails), thread in zip(wanted, threads, strict=True):
        assert thread.error is None or fails
        assert thread.error is not None or (function, key) in simulation.entries


@pytest.mark.parametrize("gate", [GateWithoutEpochs, GateThatPublishesAtFinish, GateThatDoesNotWaitForInsertions])
def test_control_schedules_find_the_second_compile_of_a_wrong_gate(gate: type[Gate]) -> None:
    twice: list[list[int]] = []

    @settings(max_examples=300, deadline=None, database=None, phases=[Phase.generate], derandomize=True)
    @given(choices=st.lists(st.integers(0, 1), min_size=4, max_size=8))
    def search(choices: list[int]) -> None:
        if not twice:
            simulation, _ = run_schedule(gate(), [(0, "f", "")] * 2, choices, into_the_hole=True)
            if len(simulation.compiles) > 1:
                twice.append(choices)

    search()
    assert twice, "no schedule showed the fault: the test above proves nothing"


# ---------------------------------------------------------------------------------------------------------- model checker


class FirstCallFlag(Simulation):
    """The usual hand-written fix: a flag and a lock for each function."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[bool] = []

    def call(self, key: Hashable = "key", function: str = "f") -> Hashable:
        if self.called:
            return self.as_torch_does(key)
        with self.lock:
            if not self.called:
                self.as_torch_does(key)
                self.called.append(True)
                return key
        return self.as_torch_does(key)

    def as_torch_does(self, key: Hashable) -> Hashable:
        if key not in self.entries:
            with self.lock:
                self.compiles.append(key)
            self.entries.add(key)
        return key


def compiled_once(simulation: Simulation) -> bool:
    return all(count == 1 for count in Counter(simulation.compiles).values())


def call_key(simulation: Simulation) -> None:
    simulation.call("key")


def call_other_key(simulation: Simulation) -> None:
    simulation.call("other")


@pytest.mark.parametrize("workers", [[call_key] * 2, [call_key, call_other_key]], ids=["one key", "two keys"])
@pytest.mark.parametrize("options", [{"preemption_bound": 1}, {"max_executions": 150}], ids=["all", "some"])
def test_checker_two_threads_compile_each_key_once(explore: Any, workers: Any, options: dict[str, int]) -> None:
    """All orders with one switch away from a runnable thread, and some of those with two (all of them hold: 20 s)."""
    result = explore(Simulation, workers, compiled_once, **options)
    result.assert_holds()
    assert result.inconclusive_reason is None


def test_checker_three_threads_compile_once(explore: Any) -> None:
    result = explore(Simulation, [call_key] * 3, compiled_once, max_executions=150)
    result.assert_holds()


@pytest.mark.parametrize("gate", [GateWithoutEpochs, GateThatPublishesAtFinish, GateThatDoesNotWaitForInsertions])
def test_control_checker_finds_the_second_compile_of_a_wrong_gate(explore: Any, gate: type[Gate]) -> None:
    result = explore(lambda: Simulation(gate()), [call_key] * 2, compiled_once)
    assert not result.property_holds


def test_control_checker_finds_that_a_first_call_flag_does_nothing_for_the_second_key(explore: Any) -> None:
    def setup() -> FirstCallFlag:
        simulation = FirstCallFlag()
        simulation.call("key")
        return simulation

    assert not explore(setup, [call_other_key] * 2, compiled_once).property_holds


class TwoLocks:
    """A lock of one's own around the call, and torch's inside it; a backend calls a guarded function."""

    def __init__(self) -> None:
        self.own: Any = threading.RLock()
        self.torchs: Any = threading.RLock()
        self.done: list[str] = []

    def call(self) -> None:
        with self.own, self.torchs:
            self.done.append("call")

    def compile_with_a_backend_that_calls(self) -> None:
        with self.torchs:
            self.call()


def test_control_checker_finds_that_two_locks_deadlock(explore: Any) -> None:
    workers = [TwoLocks.call, TwoLocks.compile_with_a_backend_that_calls]
    result = explore(TwoLocks, workers, lambda locks: len(locks.done) == 2)
    assert not result.property_holds
    assert "deadlock" in str(result.explanation).lower()


class OneLock(TwoLocks):
    """The lock of the library *is* torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.own = locked_by(self.torchs)


def test_checker_one_lock_does_not_deadlock(explore: Any) -> None:
    workers = [OneLock.call, OneLock.compile_with_a_backend_that_calls]
    result = explore(OneLock, workers, lambda locks: len(locks.done) == 2, max_executions=300)
    result.assert_holds()


class Counted:
    """A number that only the lock protects."""

    def __init__(self, protected: bool) -> None:
        self.lock = locked_by(threading.RLock())
        self.protected = protected
        self.value = 0

    def add(self) -> None:
        if self.protected:
            with self.lock:
                self.value += 1
        else:
            self.value += 1

    def right(self) -> bool:
        statistics = self.lock.statistics()
        return self.value == 2 and not statistics.locked and statistics.waiters == ()


def test_checker_the_lock_excludes_and_leaves_no_trace(explore: Any) -> None:
    explore(lambda: Counted(True), [Counted.add] * 2, Counted.right, max_executions=300).assert_holds()


def test_control_checker_finds_the_lost_update_without_the_lock(explore: Any) -> None:
    assert not explore(lambda: Counted(False), [Counted.add] * 2, Counted.right).property_holds


class Timed:
    """One thread holds for ever (in virtual time); the other waits with a limit."""

    def __init__(self) -> None:
        self.lock = locked_by(threading.RLock(), warn_after=1000.0)
        self.answers: list[bool] = []

    def hold(self) -> None:
        with self.lock:
            time.sleep(100.0)

    def wait(self) -> None:
        taken = self.lock.acquire(timeout=10.0)
        self.answers.append(taken)
        if taken:
            self.lock.release()


def test_checker_a_wait_with_a_timeout_always_ends(explore: Any) -> None:
    result = explore(
        Timed,
        [Timed.hold, Timed.wait],
        lambda timed: len(timed.answers) == 1 and not timed.lock.statistics().locked,
        max_executions=300,
    )
    result.assert_holds()
