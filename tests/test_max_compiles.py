"""``safecompile.testing.max_compiles``: a test fails if more is compiled, and its error says what and why."""

# ruff: noqa: PT012  the end of the block is part of what raises
from __future__ import annotations

import asyncio
import pickle
import re
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import safecompile
from safecompile import UnsupportedCallableError, fx_trace_lock, thread_safe_compile
from safecompile._core import events
from safecompile._patches import gate
from safecompile.testing import Compile, CompileLimitError, max_compiles, no_compiles
from tests.helpers.backends import AotCountingBackend, CountingBackend
from tests.helpers.subprocess_run import run_forked
from tests.helpers.threads import run_threads, switch_interval, wait_until

pytestmark = pytest.mark.usefixtures("nothing_compiled")

THREADS = 8
FACTOR = 2


@pytest.fixture(autouse=True)
def _nobody_stays_subscribed() -> Iterator[None]:
    yield
    assert events._subscribers == ()


def eager(function: Callable[..., Any], **options: Any) -> Any:
    return torch.compile(function, backend="eager", **{"dynamic": False, **options})


def ones(*shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(shape, **options)


def polynomial(x: torch.Tensor, flag: bool = True) -> torch.Tensor:
    return x * x + 2 if flag else x


def times_factor(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR


def breaks(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    torch._dynamo.graph_break()
    return y * x


class Scale(nn.Module):
    def __init__(self, factor: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.factor


def failing(gm: torch.fx.GraphModule, example_inputs: object) -> Any:
    raise ArithmeticError("no such graph")


def line(function: Any) -> str:
    code = function.__code__
    return re.escape(f"({code.co_filename}:{code.co_firstlineno})")


def reasons(*calls: Callable[[], object]) -> list[str]:
    """Return why each of the calls compiles, for the first reason of each compile."""
    with max_compiles(100) as limit:
        for call in calls:
            call()
    return [one.reasons[0] for one in limit.compiles]


def test_as_many_compiles_as_are_allowed_are_no_error_and_one_more_is() -> None:
    f = eager(polynomial)
    with max_compiles(2) as limit:
        f(ones(3))
        f(ones(3))
        f(ones(4))
    assert [(one.kind, one.function) for one in limit.compiles] == [("forward", "polynomial")] * 2
    with pytest.raises(CompileLimitError), max_compiles(1):
        f(ones(5))
        f(ones(6))
    with no_compiles():
        f(ones(3))


def test_the_text_has_each_compile_with_its_number_place_thread_and_reason() -> None:
    f = eager(polynomial)
    with pytest.raises(CompileLimitError) as caught, max_compiles(1):
        f(ones(3))
        f(ones(4))
    place = f"forward of polynomial {line(polynomial)} in thread 'MainThread'"
    text = str(caught.value)
    assert text.startswith("at most 1 compile allowed, and there were 2:\n")
    assert re.search(rf"\n  1\. {place}: first call\n", text)
    assert re.search(rf"\n  2\. {place}: argument x: size mismatch at index 0: expected 3, actual 4\n", text)
    assert "safecompile.warmup" in text
    assert [one.seconds > 0 for one in caught.value.compiles] == [True, True]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda f: f(ones(4)), "argument x: size mismatch at index 0: expected 3, actual 4"),
        (lambda f: f(ones(3, 3)), "argument x: rank mismatch: expected 1, actual 2"),
        (lambda f: f(ones(3).double()), "argument x: dtype mismatch: expected Float, actual Double"),
        (lambda f: f(ones(3, requires_grad=True)), "argument x: requires_grad mismatch: expected requires_grad=0"),
        (lambda f: torch.no_grad()(f)(ones(3)), "grad mode changed"),
    ],
    ids=["size", "rank", "dtype", "requires_grad", "grad mode"],
)
def test_the_reason_is_what_changed(call: Callable[[Any], object], expected: str) -> None:
    f = eager(polynomial)
    assert reasons(lambda: f(ones(3)), lambda: call(f)) == ["first call", expected]


def test_the_reason_tells_a_changed_value_and_what_it_was() -> None:
    f = eager(lambda x, scale, name: x * scale * len(name))
    assert reasons(
        lambda: f(ones(3), 2, "ab"),
        lambda: f(ones(3), 3, "ab"),
        lambda: f(ones(3), 2, "abc"),
    ) == [
        "first call",
        "argument scale: expected 2, actual 3",
        "argument name: expected 'ab', actual 'abc'",
    ]
    g = eager(lambda x, scale: x * scale)
    assert reasons(
        lambda: g(ones(3), 2),
        lambda: g(ones(3), ones(3)),
        lambda: g(2, ones(3)),
    ) == ["first call", "argument scale: expected 2, actual Tensor", "argument x: expected a tensor, actual int"]


def test_the_reason_tells_a_changed_global_closure_variable_and_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(factor: int) -> Any:
        return eager(lambda x: x * factor)

    def change() -> None:
        monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3)

    f, one, two = eager(times_factor), make(1), make(2)
    first, second = eager(Scale(2)), eager(Scale(3))
    x = ones(2, 3)
    assert reasons(lambda: f(x), change, lambda: f(x)) == ["first call", "global FACTOR: expected 2, actual 3"]
    assert reasons(lambda: one(x), lambda: two(x)) == ["first call", "closure variable factor: expected 1, actual 2"]
    one_call, changed = reasons(lambda: first(x), lambda: second(x))
    assert one_call == "first call"
    # Older torch says there, too, how to make it dynamic.
    assert re.sub(r" +\(HINT: [^)]*\)", "", changed) == "argument self.factor: expected 2, actual 3"


def test_the_reason_is_taken_from_the_nearest_entry() -> None:
    f = eager(lambda x, scale, other: x * scale * other)
    f(ones(3), 2, 2)
    f(ones(3), 5, 6)
    f(ones(4, 4), 2, 3)
    f(ones(3).double(), 2, 3)
    with max_compiles(1) as limit:
        f(ones(3), 2, 3)
    (compile_,) = limit.compiles
    assert compile_.reasons[0] == "argument other: expected 2, actual 3"
    assert len(compile_.reasons) == 4


def test_a_shape_guard_is_told_by_the_condition_that_fails() -> None:
    f = eager(lambda x, y: x + y, dynamic=True)
    first, second = reasons(lambda: f(ones(3), ones(3)), lambda: f(ones(3), ones(1)))
    assert first == "first call"
    assert re.fullmatch(r"argument \w: \w\.size\(\)\[0\] == \w\.size\(\)\[0\] does not hold", second)


def test_another_backend_is_a_first_call() -> None:
    eager(polynomial)(ones(3))
    assert reasons(lambda: torch.compile(polynomial, backend=CountingBackend())(ones(3))) == ["first call"]


def test_what_follows_a_graph_break_is_a_compile_of_its_own() -> None:
    with max_compiles(2) as limit:
        eager(breaks)(ones(3))
    first, second = limit.compiles
    start = breaks.__code__.co_firstlineno
    assert (first.kind, first.function, first.line) == ("forward", "breaks", start)
    assert (second.kind, second.function, second.line) == ("resume function", "breaks", start + 2)
    assert second.reasons == ("first call",)


def test_a_backward_counts_when_it_is_first_used() -> None:
    backend = AotCountingBackend()
    f = torch.compile(polynomial, backend=backend, dynamic=False)
    with max_compiles(1) as limit:
        losses = [f(ones(3, requires_grad=True)).sum() for _ in range(2)]
    expected = rf"1\. backward of polynomial {line(polynomial)}.*first backward"
    with pytest.raises(CompileLimitError, match=expected), no_compiles():
        losses[0].backward()
    with no_compiles():
        losses[1].backward()
    assert (len(limit.compiles), backend.forward.count, backend.backward.count) == (1, 1, 1)


def test_a_backward_that_16_threads_use_first_is_one_compile() -> None:
    f = thread_safe_compile(polynomial, backend=AotCountingBackend())
    losses = [f(ones(3, requires_grad=True)).sum() for _ in range(16)]
    with switch_interval(1e-6), max_compiles(1) as limit:
        run_threads(lambda index: losses[index].backward(), 16)
    assert [one.kind for one in limit.compiles] == ["backward"]


def test_a_graph_given_to_a_compiler_directly_counts() -> None:
    from torch._functorch.aot_autograd import aot_module_simplified

    graph = torch.fx.symbolic_trace(lambda x: (x + 1,))
    place = r"graph of test_a_graph_given_\w+ \(.*test_max_compiles\.py:\d+\)"
    with pytest.raises(CompileLimitError, match=place), no_compiles():
        aot_module_simplified(graph, (ones(3),), fw_compiler=AotCountingBackend().forward)


def test_a_skipped_frame_and_an_inlined_one_are_no_compiles() -> None:
    def without_tensors(x: int) -> int:
        return x + 1

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x)

    with max_compiles(1) as limit:
        assert eager(without_tensors)(1) == 2
        with torch.compiler.set_stance("force_eager"):
            eager(inner)(ones(3))
        eager(outer)(ones(3))
    assert [one.function.rpartition(".")[2] for one in limit.compiles] == ["outer"]


def test_a_failed_compile_is_listed_and_not_counted() -> None:
    f, g = torch.compile(polynomial, backend=failing), eager(times_factor)
    with max_compiles(1) as limit:
        with pytest.raises(Exception, match="no such graph"):
            f(ones(3))
        g(ones(3))
    assert len(limit.compiles) == 1
    with pytest.raises(CompileLimitError) as caught, no_compiles():
        with pytest.raises(Exception, match="no such graph"):
            f(ones(3))
        g(ones(4))
    assert re.search(
        r"there were 1:\n  1\. forward of times_factor .*\nNot counted, for they failed:\n"
        r"  - forward of polynomial .*: first call; BackendCompilerFailed: .*ArithmeticError: no such graph\n",
        str(caught.value),
    )


def test_compiles_of_all_threads_count_and_are_named() -> None:
    f = thread_safe_compile(polynomial, backend="eager", dynamic=False)
    with pytest.raises(CompileLimitError) as caught, max_compiles(THREADS - 1):
        run_threads(lambda index: f(ones(index + 2)), THREADS)
    assert {one.thread for one in caught.value.compiles} == {f"worker-{index}" for index in range(THREADS)}
    assert f"there were {THREADS}" in str(caught.value)


def test_a_herd_compiles_once() -> None:
    f = thread_safe_compile(polynomial, backend="eager")
    with switch_interval(1e-6), max_compiles(1):
        run_threads(lambda _: f(ones(3)), THREADS)


def test_without_single_flight_the_limit_sees_a_herd(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: one thread compiles, another waits for it, and then compiles the same."""
    monkeypatch.setattr(gate, "admit", lambda code, seen: True)
    backend = CountingBackend(gated=True)
    f = thread_safe_compile(polynomial, backend=backend)

    def second() -> None:
        assert backend.entered.wait(30)
        f(ones(3))

    def release() -> None:
        wait_until(lambda: fx_trace_lock.statistics().waiters)
        backend.release.set()

    with pytest.raises(CompileLimitError) as caught, max_compiles(1):
        run_threads([lambda: f(ones(3)), second, release])
    assert [one.thread for one in caught.value.compiles] == ["worker-0", "worker-1"]


def test_stock_torch_compiles_what_max_compiles_forbids() -> None:
    run_forked(
        """
        import torch
        from tests.helpers.backends import CountingBackend
        from tests.helpers.threads import gather_threads, switch_interval
        from tests.test_max_compiles import THREADS, ones, polynomial

        for attempt in range(20):
            torch._dynamo.reset()
            backend = CountingBackend()
            f = torch.compile(polynomial, backend=backend)
            with switch_interval(1e-6):
                gather_threads(lambda _: f(ones(3)), THREADS)
            if backend.count > 1:
                break
        else:
            raise SystemExit("the fault never showed")
        """
    ).check()


def test_a_pool_that_swallows_exceptions_does_not_swallow_the_limit() -> None:
    f = eager(polynomial)
    with pytest.raises(CompileLimitError), no_compiles(), ThreadPoolExecutor(1) as pool:
        pool.submit(f, ones(3))


def test_a_compile_that_began_before_the_block_is_not_counted() -> None:
    backend = CountingBackend(gated=True)
    f = thread_safe_compile(polynomial, backend=backend)
    thread = threading.Thread(target=f, args=(ones(3),))
    thread.start()
    assert backend.entered.wait(30)
    with no_compiles():
        backend.release.set()
        thread.join(30)
    assert not thread.is_alive()


def test_what_ends_after_the_block_is_neither_its_nor_the_next_ones() -> None:
    backend = CountingBackend(gated=True)
    f = thread_safe_compile(polynomial, backend=backend)
    thread = threading.Thread(target=f, args=(ones(3),))
    limit = no_compiles()
    with limit:
        thread.start()
        assert backend.entered.wait(30)
    with limit:
        backend.release.set()
        thread.join(30)
    assert not thread.is_alive()


def test_an_exception_of_the_block_wins() -> None:
    f = eager(polynomial)
    with pytest.raises(KeyError, match="mine"), no_compiles():
        f(ones(3))
        raise KeyError("mine")


def test_each_of_nested_blocks_has_its_own_count() -> None:
    f = eager(polynomial)
    with max_compiles(3) as outer:
        f(ones(3))
        with pytest.raises(CompileLimitError, match="there were 2"), max_compiles(1) as inner:
            f(ones(4))
            f(ones(5))
    assert (len(inner.compiles), len(outer.compiles)) == (2, 3)


def test_blocks_of_two_threads_both_see_a_compile_of_either() -> None:
    f = thread_safe_compile(polynomial, backend="eager")
    inside, compiled = threading.Barrier(2), threading.Barrier(2)

    def work(index: int) -> int:
        with max_compiles(1) as limit:
            inside.wait(30)
            if index == 0:
                f(ones(3))
            compiled.wait(30)
        return len(limit.compiles)

    assert run_threads(work, 2) == [1, 1]


def test_one_object_is_a_limit_for_one_block_after_the_other() -> None:
    f = eager(polynomial)
    limit = max_compiles(1)
    for rows in (3, 4):
        with limit:
            f(ones(rows))
    with limit, pytest.raises(RuntimeError, match="call max_compiles again"), limit:
        pass


def test_a_decorated_function_has_the_limit_in_each_call() -> None:
    f = eager(polynomial)

    @max_compiles(1)
    def call(*rows: int, scale: float = 1.0) -> int:
        """Call f."""
        for one in rows:
            f(ones(one) * scale)
        return len(rows)

    assert (call.__name__, call.__doc__) == ("call", "Call f.")
    assert call(3, scale=2.0) == 1
    assert call(3, 4, 4) == 3
    with pytest.raises(CompileLimitError):
        call(5, 6)


def test_methods_of_every_kind_can_be_decorated() -> None:
    f = eager(polynomial)

    class Tests:
        rows = 3

        @no_compiles()
        def method(self, plus: int) -> Any:
            return f(ones(self.rows + plus))

        @no_compiles()
        @classmethod
        def of_class(cls) -> Any:
            return f(ones(cls.rows))

        @staticmethod
        @no_compiles()
        def static() -> Any:
            return f(ones(3))

    for call in (lambda: Tests().method(1), Tests.of_class, Tests.static):
        torch._dynamo.reset()
        with pytest.raises(CompileLimitError):
            call()
    f(ones(4))
    assert Tests().method(1).shape == (4,)


async def coroutine() -> None: ...
async def stream() -> AsyncIterator[None]:
    yield


def generator() -> Iterator[None]:
    yield


@pytest.mark.parametrize(
    "function", [coroutine, stream, generator, Scale, 3], ids=lambda f: getattr(f, "__name__", str(f))
)
def test_what_runs_later_or_not_at_all_is_refused(function: Any) -> None:
    with pytest.raises(UnsupportedCallableError, match=r"max_compiles cannot decorate .*: it is .*; "):
        max_compiles(1)(function)
    with pytest.raises(UnsupportedCallableError):
        no_compiles()(staticmethod(function))


def test_a_block_inside_a_coroutine_works() -> None:
    async def run() -> None:
        with no_compiles():
            await asyncio.to_thread(eager(polynomial), ones(3))

    with pytest.raises(CompileLimitError):
        asyncio.run(run())


@pytest.mark.parametrize("n", [True, 1.0, "1", None, polynomial], ids=lambda n: getattr(n, "__name__", str(n)))
def test_a_limit_that_is_no_int_is_refused_at_once(n: Any) -> None:
    with pytest.raises(TypeError, match=r"max_compiles\(1\)"):
        max_compiles(n)


def test_a_negative_limit_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="not -1"):
        max_compiles(-1)


def test_the_error_pickles_with_its_compiles() -> None:
    f = eager(polynomial)
    with pytest.raises(CompileLimitError) as caught, no_compiles():
        f(ones(3))
    error: Any = pickle.loads(pickle.dumps(caught.value))
    assert (type(error), str(error), error.compiles) == (CompileLimitError, str(caught.value), caught.value.compiles)
    assert isinstance(error.compiles[0], Compile)
    assert issubclass(CompileLimitError, AssertionError)
    assert issubclass(CompileLimitError, safecompile.SafeCompileError)


def test_reasons_are_worked_out_for_subscribers_and_guarded_callables_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def ask(*call: object) -> tuple[str, ...]:
        asked.append(call)
        return ()

    monkeypatch.setattr(events, "explain", ask)
    f = eager(polynomial)
    with max_compiles(1):
        f(ones(3))
    assert len(asked) == 1
    f(ones(4))
    assert len(asked) == 1
    thread_safe_compile(polynomial, backend="eager", dynamic=False)(ones(5))
    assert len(asked) == 2


def test_a_guard_that_cannot_be_asked_leaves_no_more_than_that_another_graph_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from safecompile.observe import _reasons as module

    def raises(*_: object) -> Any:
        raise RuntimeError("no verbose check")

    monkeypatch.setattr(module, "_differences", raises)
    f = eager(polynomial)
    assert reasons(lambda: f(ones(3)), lambda: f(ones(4))) == ["first call", "another graph is needed"]


def test_a_block_cannot_begin_inside_a_compile_that_began_without_the_patches() -> None:
    safecompile.uninstall()
    errors: list[object] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: object) -> Any:
        with pytest.raises(safecompile.PatchesInUseError) as caught, no_compiles():
            pass
        errors.append(caught.value)
        return gm.forward

    torch.compile(polynomial, backend=backend)(ones(3))
    assert len(errors) == 1


CONFTEST = 'pytest_plugins = ["safecompile.testing.pytest_plugin"]\n'

TESTS = """
import unittest

import pytest
import torch


@torch.compile(backend="eager", dynamic=False)
def f(x):
    return x + 1


@pytest.fixture
def warm():
    f(torch.ones(3))


def test_a_warm_call_passes(no_compiles, warm):
    f(torch.ones(3))


def test_a_cold_call_fails(no_compiles):
    f(torch.ones(4))


@pytest.mark.usefixtures("no_compiles")
class TestClass:
    def test_a_cold_call_in_a_class_fails(self):
        f(torch.ones(5))


@pytest.mark.usefixtures("no_compiles")
class TestUnit(unittest.TestCase):
    def test_a_cold_call_of_unittest_fails(self):
        f(torch.ones(6))


def test_own_error_wins(no_compiles):
    f(torch.ones(7))
    raise KeyError("mine")


def test_factory(max_compiles):
    with max_compiles(1):
        f(torch.ones(8))
    with pytest.raises(AssertionError, match="size mismatch"), max_compiles(0):
        f(torch.ones(9))


def test_too_late(request):
    request.getfixturevalue("no_compiles")
"""


def test_the_fixtures_of_pytest(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    run = run_forked(
        """
        import os, sys
        import pytest

        os.chdir(sys.argv[1])
        os.environ["COLUMNS"] = "300"
        pytest.main(["-q", "-rA", "-p", "no:cacheprovider", "--rootdir", "."])
        sys.stdout.flush()
        """,
        [str(tmp_path)],
    ).check()
    passed = set(re.findall(r"^PASSED test_it\.py::(\S+)", run.stdout, re.MULTILINE))
    failed = dict(re.findall(r"^FAILED test_it\.py::(\S+) - (.*)", run.stdout, re.MULTILINE))
    assert passed == {"test_a_warm_call_passes", "test_factory"}, run.stdout
    limit = "safecompile.testing._compiles.CompileLimitError: at most 0 compiles allowed, and there were 1:"
    assert failed.keys() == {
        "test_a_cold_call_fails",
        "TestClass::test_a_cold_call_in_a_class_fails",
        "TestUnit::test_a_cold_call_of_unittest_fails",
        "test_own_error_wins",
        "test_too_late",
    }, run.stdout
    assert all(text.startswith(limit) for name, text in failed.items() if "cold" in name), failed
    assert failed["test_own_error_wins"].startswith("KeyError")
    assert "UsageError" in failed["test_too_late"]
    assert not re.search(r"^ERROR", run.stdout, re.MULTILINE)
