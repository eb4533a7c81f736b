"""``safecompile.statistics().callables``: what the calls of each guarded callable came to."""

from __future__ import annotations

import dataclasses
import gc
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import safecompile
from safecompile import thread_safe_compile
from safecompile._core.guarded import MOST_REASONS, CallableStatistics, Guarded
from tests.helpers.backends import AotCountingBackend, CountingBackend
from tests.helpers.threads import run_threads, switch_interval

pytestmark = pytest.mark.usefixtures("nothing_compiled")

THREADS = 8
FILE = __file__


def polynomial(x: torch.Tensor) -> torch.Tensor:
    return x * x + 2


def breaks(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    torch._dynamo.graph_break()
    return y * x


class Scale(nn.Module):
    def __init__(self, factor: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * self.factor


class Methods:
    factor = 2

    @thread_safe_compile(backend="eager", dynamic=False)
    def method(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    @thread_safe_compile(backend="eager", dynamic=False)
    @staticmethod
    def static(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @thread_safe_compile(backend="eager", dynamic=False)
    @classmethod
    def of_class(cls, x: torch.Tensor) -> torch.Tensor:
        return x * cls.factor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x - 1


def failing(gm: torch.fx.GraphModule, example_inputs: object) -> Any:
    raise ArithmeticError("no such graph")


def guarded(function: Any = polynomial, **options: Any) -> Any:
    return thread_safe_compile(function, **{"backend": "eager", "dynamic": False, **options})


def record(name: str) -> CallableStatistics:
    """Return what is counted of the one callable of this name in this file."""
    (one,) = [one for one in safecompile.statistics().callables if (one.name, one.filename) == (name, FILE)]
    return one


@pytest.fixture(autouse=True)
def _those_of_other_tests_are_gone() -> None:
    gc.collect()


def test_calls_compiles_and_reasons_of_a_function() -> None:
    f = guarded()
    assert record("polynomial") == CallableStatistics(
        name="polynomial",
        filename=FILE,
        line=polynomial.__code__.co_firstlineno,
        calls=0,
        compiles=0,
        compile_seconds=0.0,
        waits=0,
        waited_seconds=0.0,
        eager_runs=0,
        reasons=(),
    )
    for rows in (3, 3, 4, 3, 5):
        f(torch.ones(rows))
    got = record("polynomial")
    assert (got.calls, got.compiles, got.waits, got.eager_runs) == (5, 3, 0, 0)
    assert got.compile_seconds > 0
    assert (
        dict(got.reasons).keys()
        == {
            "first call",
            "argument x: size mismatch at index 0: expected 3, actual 4",
            "argument x: size mismatch at index 0: expected 3, actual 5",
        }
        or sum(dict(got.reasons).values()) == 3
    )


def test_plain_torch_compile_is_not_counted() -> None:
    torch.compile(polynomial, backend="eager")(torch.ones(3))
    assert not [one for one in safecompile.statistics().callables if one.filename == FILE and one.name == "polynomial"]


def test_methods_of_every_kind_and_callable_objects() -> None:
    bound = guarded(Methods().__call__)
    for call in (Methods().method, Methods.static, Methods.of_class, bound):
        before = {one.name: one.calls for one in safecompile.statistics().callables if one.filename == FILE}
        call(torch.ones(3))
        call(torch.ones(3))
        after = {one.name: one.calls for one in safecompile.statistics().callables if one.filename == FILE}
        changed = {name: after[name] - before[name] for name in after if after[name] != before.get(name)}
        assert list(changed.values()) == [2], (call, changed)
    assert {"Methods.method", "Methods.static", "Methods.of_class", "Methods.__call__"} <= {
        one.name for one in safecompile.statistics().callables
    }


def test_replicas_of_a_module_are_one_callable() -> None:
    class Own(Scale):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    modules = [guarded(Own()) for _ in range(3)]
    for module in modules:
        module(torch.ones(3))
    got = record("Own.forward")
    assert got.line == Own.forward.__code__.co_firstlineno
    assert got.calls == 3
    assert sum(count for _, count in got.reasons) == got.compiles


def test_parts_after_a_graph_break_are_compiles_of_the_call() -> None:
    f = guarded(breaks)
    f(torch.ones(3))
    f(torch.ones(3))
    got = record("breaks")
    assert (got.calls, got.compiles, got.reasons) == (2, 2, (("first call", 2),))


def test_nested_calls_count_for_the_innermost() -> None:
    inner = guarded()

    def outer(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):  # a frame that breaks in a loop is not compiled, but what it calls is
            torch._dynamo.graph_break()
            x = inner(x)
        return helper(x)

    def helper(x: torch.Tensor) -> torch.Tensor:
        return x.cos()

    f = guarded(outer)
    f(torch.ones(3))
    assert (record("polynomial").calls, record("polynomial").compiles) == (2, 1)
    got = record("outer")
    assert (got.calls, got.reasons) == (1, (("first call", got.compiles),))
    assert got.compiles == 1  # helper


def test_an_inlined_call_is_part_of_the_outer_one() -> None:
    inner = guarded()

    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x) + 1

    f = guarded(outer)
    f(torch.ones(3))
    assert (record("polynomial").calls, record("polynomial").compiles) == (0, 0)
    assert (record("outer").calls, record("outer").compiles) == (1, 1)


def test_a_plain_compiled_function_counts_for_the_guarded_call_it_is_in() -> None:
    plain = torch.compile(polynomial, backend=CountingBackend(), dynamic=False)

    def outer(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
            x = plain(x)
        return x

    f = guarded(outer)
    f(torch.ones(3))
    assert (record("outer").calls, record("outer").compiles) == (1, 1)


def test_a_failed_compile_counts_its_seconds_only() -> None:
    f = guarded(backend=failing)
    for _ in range(2):
        with pytest.raises(Exception, match="no such graph"):
            f(torch.ones(3))
    got = record("polynomial")
    assert (got.calls, got.compiles, got.reasons) == (2, 0, ())
    assert got.compile_seconds > 0


def test_a_call_that_raises_counts() -> None:
    def raises(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        raise KeyError("mine")

    f = guarded(raises)
    for _ in range(3):
        with pytest.raises(KeyError, match="mine"):
            f(torch.ones(3))
    assert record("raises").calls == 3


def test_a_backward_counts_for_its_forward_also_on_another_thread() -> None:
    f = guarded(backend=AotCountingBackend())
    losses = [f(torch.ones(3, requires_grad=True)).sum() for _ in range(2)]
    assert record("polynomial").compiles == 1
    run_threads(lambda index: losses[index].backward(), 2)
    got = record("polynomial")
    assert (got.calls, got.compiles) == (2, 2)
    assert dict(got.reasons) == {"first call": 1, "first backward through its forward": 1}


def test_a_backward_counts_for_the_innermost_of_nested_calls() -> None:
    inner = guarded(backend=AotCountingBackend())

    def outer(x: torch.Tensor) -> torch.Tensor:
        for _ in range(1):
            torch._dynamo.graph_break()
            x = inner(x)
        return x

    f = guarded(outer)
    f(torch.ones(3, requires_grad=True)).sum().backward()
    assert record("polynomial").compiles == 2
    assert record("outer").compiles == 0


def test_no_call_of_any_thread_is_lost() -> None:
    f = guarded()
    with switch_interval(1e-6):
        run_threads(lambda index: [f(torch.ones(index % 2 + 3)) for _ in range(250)], THREADS)
    got = record("polynomial")
    assert (got.calls, got.compiles) == (250 * THREADS, 2)
    # Who looks again makes no second call.
    assert sum(count for _, count in got.reasons) == 2


def test_adding_in_python_loses_calls() -> None:
    """The negative control: what a count that is no C code comes to where the interpreter lets another thread go on."""
    both_have_read = threading.Barrier(2)

    class Count:
        value = 0

        def __next__(self) -> None:
            seen = self.value
            both_have_read.wait(30)
            self.value = seen + 1

    count = Count()
    run_threads(lambda _: next(count), 2)
    assert count.value == 1


def test_asking_counts_nothing() -> None:
    f = guarded()
    f(torch.ones(3))
    assert [record("polynomial").calls for _ in range(3)] == [1, 1, 1]


def test_a_callable_that_is_gone_disappears() -> None:
    def gone(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    f = guarded(gone, backend=AotCountingBackend())
    f(torch.ones(3, requires_grad=True)).sum().backward()
    assert record("gone").compiles == 2
    kept = weakref.ref(f)
    del f, gone
    torch._dynamo.reset()
    gc.collect()
    assert kept() is None
    assert not [one for one in safecompile.statistics().callables if one.name == "gone"]


def test_same_names_are_told_apart_by_file_and_line() -> None:
    def make_one() -> Any:
        def same(x: torch.Tensor) -> torch.Tensor:
            return x + 1

        return guarded(same)

    def make_two() -> Any:
        def same(x: torch.Tensor) -> torch.Tensor:
            return x + 2

        return guarded(same)

    one, two = make_one(), make_two()
    one(torch.ones(3))
    for _ in range(2):
        two(torch.ones(3))
    found = [s for s in safecompile.statistics().callables if s.name == "same"]
    assert [(s.calls, s.filename) for s in found] == [(1, FILE), (2, FILE)]  # in the order of their lines
    assert found[0].line < found[1].line


def test_one_function_guarded_twice_is_two_callables_that_share_graphs() -> None:
    one, two = guarded(), guarded()
    one(torch.ones(3))
    two(torch.ones(3))
    two(torch.ones(3))
    found = [(s.calls, s.compiles) for s in safecompile.statistics().callables if s.name == "polynomial"]
    assert sorted(found) == [(1, 1), (2, 0)]


def test_many_reasons_are_bounded() -> None:
    one = Guarded("f", "f.py", 1)
    for number in range(2 * MOST_REASONS):
        one.compiled(0.5, f"argument x: expected {number}, actual {number + 1}")
        one.compiled(0.5, "first call" if number else "argument x: expected 0, actual 1")
    got = one.statistics()
    assert got.compiles == 4 * MOST_REASONS
    assert got.compile_seconds == 2 * MOST_REASONS
    assert len(got.reasons) == MOST_REASONS
    assert dict(got.reasons)["first call"] == 2 * MOST_REASONS - 1


def test_a_snapshot_pickles_and_is_a_dictionary_for_those_who_want_one() -> None:
    f = guarded()
    f(torch.ones(3))
    before = safecompile.statistics()
    assert pickle.loads(pickle.dumps(before)) == before
    got = dataclasses.asdict(record("polynomial"))
    assert (got["calls"], got["reasons"]) == (1, (("first call", 1),))
    with pytest.raises(dataclasses.FrozenInstanceError):
        record("polynomial").calls = 3  # type: ignore[misc]
    f(torch.ones(3))
    assert [one.calls for one in before.callables if one.name == "polynomial"] == [1]  # it stays what it was


def test_uninstalling_keeps_the_counts_and_later_calls_go_on() -> None:
    f = guarded()
    f(torch.ones(3))
    safecompile.uninstall()
    assert record("polynomial").calls == 1
    f(torch.ones(3))
    assert (record("polynomial").calls, record("polynomial").compiles) == (2, 1)
