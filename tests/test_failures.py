"""Compiles that fail, are interrupted, or call the library again: the lock is free, the waiters try themselves."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import safecompile
from safecompile import fx_trace_lock, thread_safe_compile
from tests.helpers.backends import CountingBackend
from tests.helpers.subprocess_run import run_forked
from tests.helpers.threads import gather_threads, run_threads

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("nothing_compiled")

THREADS = 16


def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def cosine(x: torch.Tensor) -> torch.Tensor:
    return x.cos()


class FailingBackend(CountingBackend):
    """Raises in the first `failures` compiles."""

    def __init__(self, failures: int, error: BaseException) -> None:
        super().__init__()
        self._failures = failures
        self._error = error

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        self.record(gm)
        if self.count <= self._failures:
            raise self._error
        return gm.forward


def assert_usable() -> None:
    """The lock is free, and a thread of its own can compile."""
    assert not fx_trace_lock.statistics().locked
    f = thread_safe_compile(lambda x: x - 1, backend="eager")
    (result,) = run_threads(lambda _: f(torch.ones(2)), 1)
    assert torch.equal(result, torch.zeros(2))
    assert not torch.compiler.is_compiling()


def test_a_backend_that_always_fails_gives_every_thread_the_same_error() -> None:
    backend = FailingBackend(10**6, ArithmeticError("this backend cannot"))
    f = thread_safe_compile(square, backend=backend)
    x = torch.randn(4)
    outcomes = gather_threads(lambda _: f(x), THREADS)
    assert {type(outcome).__name__ for outcome in outcomes} == {"BackendCompilerFailed"}
    assert all("this backend cannot" in str(outcome) for outcome in outcomes)
    assert backend.count == THREADS  # each tried for itself
    assert_usable()


@pytest.mark.parametrize("failures", [1, 3])
def test_after_a_failed_compile_the_waiters_compile_once_and_are_right(failures: int) -> None:
    backend = FailingBackend(failures, ArithmeticError("not this time"))
    f = thread_safe_compile(square, backend=backend, dynamic=False)
    x = torch.randn(4)
    outcomes = gather_threads(lambda _: f(x), THREADS)
    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert len(failed) == failures
    assert all("not this time" in str(error) for error in failed)
    for outcome in outcomes:
        if isinstance(outcome, torch.Tensor):
            torch.testing.assert_close(outcome, x * x)
    assert backend.count == failures + 1
    assert torch.equal(f(x), x * x)
    assert_usable()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()], ids=repr)
def test_an_interrupted_compile_leaves_the_lock_free_and_the_waiters_go_on(error: BaseException) -> None:
    backend = FailingBackend(1, error)
    f = thread_safe_compile(square, backend=backend)
    x = torch.randn(4)
    outcomes = gather_threads(lambda _: f(x), THREADS)
    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert [type(outcome) for outcome in failed] == [type(error)]
    assert backend.count == 2
    assert_usable()


def test_code_that_dynamo_cannot_trace_under_fullgraph_raises_in_every_thread() -> None:
    @thread_safe_compile(backend="eager", fullgraph=True)
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y

    outcomes = gather_threads(lambda _: broken(torch.ones(2)), THREADS)
    assert {type(outcome).__name__ for outcome in outcomes} == {"Unsupported"}
    assert_usable()


def test_an_exception_of_the_users_own_is_raised_in_every_thread() -> None:
    @thread_safe_compile(backend="eager")
    def picky(x: torch.Tensor, n: int) -> torch.Tensor:
        if n < 0:
            raise ValueError(f"n is {n}")
        return x.sin() * n

    x = torch.randn(4)

    def work(index: int) -> bool:
        n = -1 if index % 2 else 2
        if n < 0:
            with pytest.raises(ValueError, match="n is -1"):
                picky(x, n)
        else:
            torch.testing.assert_close(picky(x, n), x.sin() * n)
        return True

    assert all(run_threads(work, THREADS))
    assert_usable()


def test_wrong_arguments_are_the_functions_own_type_error() -> None:
    f = thread_safe_compile(square, backend="eager")
    for outcome in gather_threads(lambda _: f(), THREADS):  # type: ignore[call-arg]
        assert isinstance(outcome, TypeError)
        assert "square() missing 1 required positional argument: 'x'" in str(outcome)
    assert_usable()


class Hostile:
    """Compares itself by raising: a guard on it raises where it is checked."""

    armed = False

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if Hostile.armed:
            raise RuntimeError("compared")
        return self is other

    def __hash__(self) -> int:
        return self.value


def test_objects_that_raise_when_compared_harm_no_call() -> None:
    f = thread_safe_compile(lambda x, h: x * h.value, backend="eager", dynamic=False)
    x = torch.ones(2)
    things = [Hostile(value) for value in range(3)]
    Hostile.armed = True
    try:
        for got in run_threads(lambda index: (index, f(x, things[index % 3])), THREADS):
            assert torch.equal(got[1], x * (got[0] % 3))
    finally:
        Hostile.armed = False
    assert_usable()


def test_a_guard_on_a_property_that_raises_in_one_thread_only_fails_there() -> None:
    class Moody(nn.Module):
        @property
        def factor(self) -> int:
            if getattr(own, "fails", False):
                raise LookupError("no factor in this thread")
            return 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor_of()

        @torch.compiler.disable
        def factor_of(self) -> int:
            return self.factor

    own = threading.local()
    module = thread_safe_compile(Moody(), backend="eager")

    def work(index: int) -> None:
        own.fails = bool(index % 2)
        if own.fails:
            with pytest.raises(LookupError, match="no factor in this thread"):
                module(torch.ones(2))
        else:
            assert torch.equal(module(torch.ones(2)), torch.full((2,), 2.0))

    run_threads(work, THREADS)
    assert_usable()


def test_a_backend_that_calls_a_cold_guarded_function_finishes() -> None:
    inner_backend = CountingBackend()
    inner = thread_safe_compile(lambda x: x + 10, backend=inner_backend)

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        constant = inner(torch.zeros(1))
        return lambda *args: tuple(out + constant for out in gm.forward(*args))

    outer = [
        thread_safe_compile(function, backend=backend, fullgraph=True)
        for function in (lambda x: x.sin(), lambda x: x.cos())
    ]
    x = torch.randn(4)

    def work(index: int) -> None:
        if index % 3 == 2:
            torch.testing.assert_close(inner(x), x + 10)
        else:
            want = x.cos() if index % 3 else x.sin()
            torch.testing.assert_close(outer[index % 3](x), want + 10)

    run_threads(work, THREADS)
    assert_usable()


def test_backends_that_call_each_others_functions_do_not_deadlock() -> None:
    first: Any = None
    second: Any = None

    def backend_for(other: Callable[[], Any]) -> Callable[..., Any]:
        def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
            if not getattr(own, "inside", False):
                own.inside = True
                try:
                    other()(torch.ones(3))
                finally:
                    own.inside = False
            return gm.forward

        return backend

    own = threading.local()
    first = thread_safe_compile(sine, backend=backend_for(lambda: second))
    second = thread_safe_compile(cosine, backend=backend_for(lambda: first))
    x = torch.randn(3)
    run_threads(
        lambda index: torch.testing.assert_close((first, second)[index % 2](x), (x.sin(), x.cos())[index % 2]), 8
    )
    assert_usable()


def test_a_backend_may_compile_the_same_function_for_another_shape() -> None:
    shapes: list[int] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        rows = example_inputs[0].shape[0]
        shapes.append(rows)
        if rows > 2:
            f(torch.ones(rows - 1))
        return gm.forward

    f: Any = thread_safe_compile(square, backend=backend, dynamic=False)
    x = torch.randn(4)
    for got in run_threads(lambda _: f(x), 8):
        torch.testing.assert_close(got, x * x)
    assert sorted(shapes) == [2, 3, 4]
    assert_usable()


def test_guarded_functions_inside_guarded_functions_are_traced_into_one_graph() -> None:
    inner_backend, backend = CountingBackend(), CountingBackend()
    inner = thread_safe_compile(lambda x: x.sin(), backend=inner_backend)
    outer = thread_safe_compile(lambda x: inner(x) + inner(x * 2), backend=backend, fullgraph=True)
    x = torch.randn(4)
    for got in run_threads(lambda _: outer(x), THREADS):
        torch.testing.assert_close(got, x.sin() + (x * 2).sin())
    assert (backend.count, inner_backend.count) == (1, 0)


def test_recursion_through_the_decorated_name_is_compiled_once() -> None:
    backend = CountingBackend()

    @thread_safe_compile(backend=backend, fullgraph=True, dynamic=False)
    def power(x: torch.Tensor, n: int) -> torch.Tensor:
        return x if n == 0 else power(x, n - 1) * 2

    x = torch.randn(4)
    for got in run_threads(lambda _: power(x, 5), THREADS):
        torch.testing.assert_close(got, x * 32)
    assert backend.count == 1


def test_recursion_through_a_break_is_compiled_as_in_one_thread() -> None:
    def run(threads: int) -> int:
        torch._dynamo.reset()
        backend = CountingBackend()

        @thread_safe_compile(backend=backend, dynamic=False)
        def power(x: torch.Tensor, n: int) -> torch.Tensor:
            y = x * 2
            torch._dynamo.graph_break()
            return y if n == 0 else power(y, n - 1).sin()

        x = torch.randn(4)
        want = ((x * 8).sin()).sin()
        for got in run_threads(lambda _: power(x, 2), threads):
            torch.testing.assert_close(got, want)
        return backend.count

    assert run(THREADS) == run(1)


def test_a_compile_may_be_nested_in_the_lock_itself() -> None:
    backend = CountingBackend()
    f = thread_safe_compile(square, backend=backend)
    x = torch.randn(4)

    def work(_: int) -> torch.Tensor:
        with fx_trace_lock:
            return f(x)

    run_threads(work, 8)
    assert backend.count == 1
    assert_usable()


def test_a_thread_that_ends_in_a_failed_compile_leaves_no_owner_behind() -> None:
    for error in (ArithmeticError("no"), KeyboardInterrupt(), SystemExit()):
        f = thread_safe_compile(lambda x: x + 1, backend=FailingBackend(10, error))
        gather_threads(lambda _, f=f: f(torch.ones(2)), 2)  # type: ignore[misc]
        statistics = safecompile.statistics().lock
        assert (statistics.owner, statistics.waiters) == (None, ())


def test_an_entry_taken_away_by_a_reset_is_not_waited_for() -> None:
    run_forked(
        """
        import os, traceback, torch
        from safecompile import thread_safe_compile
        from tests.helpers.threads import run_threads
        from tests.test_failures import Scale

        module = thread_safe_compile(Scale(), backend="eager")
        module(torch.ones(3))
        torch._dynamo.reset()
        f = thread_safe_compile(lambda x: x + 1, backend="eager")
        try:
            run_threads(lambda _: f(torch.ones(3)), 1, timeout=15)  # the gate's limit is twice that
        except AssertionError:
            traceback.print_exc()
            os._exit(1)
        """
    ).check()


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight
