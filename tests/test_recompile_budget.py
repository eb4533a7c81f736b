"""The recompile limit is each thread's, replica's and device's own, and reaching it is never silent (pytorch#177355)."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import safecompile
from safecompile import capture_context, thread_safe_compile
from safecompile._core import events
from safecompile.observe import RecompileLimit
from tests.helpers.backends import CountingBackend
from tests.helpers.threads import run_threads
from tests.helpers.torch_version import RECOMPILE_LIMIT, lacks

pytestmark = pytest.mark.usefixtures("nothing_compiled")

# torch 2.6 can only stop for good, for all who call the code.
stops_for_one = lacks((2, 7), "a frame that runs eagerly this once")

LIMIT = 8


def function(x: Tensor) -> Tensor:
    return x.sin() + 1


def scaled_by(model: Scaled, x: Tensor) -> Tensor:
    return model.linear(x) * model.factor


def first_of(values: list[Any]) -> Tensor:
    first: Tensor = values[0]
    return first * 2


def operator(self: Tensor) -> Tensor:
    return self.sin() + 1


def fresh(original: Callable[..., Tensor] = function) -> Callable[..., Tensor]:
    """Return a copy with code of its own: the limit is counted by code."""
    return FunctionType(original.__code__.replace(), globals(), original.__name__)


class Scaled(nn.Module):
    """Each of them needs a graph of its own: the factor is part of it."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.factor


class Broken(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        torch._dynamo.graph_break()
        return y * self.factor


class Owner:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def method(self, x: Tensor) -> Tensor:
        return x * self.factor


def compile_plainly(fn: Any, **options: Any) -> Any:
    make: Any = torch.compile  # with options that not every torch has
    return make(fn, **options)


# ---------------------------------------------------------------------------------------------- whose limit it is


def shapes_in_three_threads(call: Callable[[Tensor], Tensor]) -> None:
    def work(thread: int) -> None:
        for size in range(4):
            x = torch.randn(10 * thread + size + 2)
            assert torch.equal(call(x), x.sin() + 1)

    run_threads(work, 3)


@pytest.mark.parametrize("make", [thread_safe_compile, compile_plainly])
def test_threads_do_not_use_up_each_others_limit(make: Callable[..., Any]) -> None:
    safecompile.install()
    backend = CountingBackend()
    shapes_in_three_threads(make(fresh(), backend=backend, dynamic=False))
    assert backend.count == 12


# Before torch 2.12 such calls of several threads leave their `dynamic=` in the configuration.
@torch._dynamo.config.patch(automatic_dynamic_shapes=True, assume_static_by_default=True)
def test_control_with_torch_alone_threads_use_up_one_limit() -> None:
    safecompile.uninstall()
    backend = CountingBackend()
    shapes_in_three_threads(torch.compile(fresh(), backend=backend, dynamic=False))
    assert backend.count < 12


@pytest.mark.parametrize("cls", [Scaled, Broken])
@pytest.mark.parametrize("threads", [1, 10])
def test_ten_replicas_that_each_need_a_graph_have_ten_graphs(cls: type[Scaled], threads: int) -> None:
    backend = CountingBackend()
    replicas = [thread_safe_compile(cls(factor), backend=backend, dynamic=False) for factor in range(10)]
    x = torch.randn(3, 4)

    def call(replica: Scaled) -> None:
        assert torch.allclose(replica(x), replica.linear(x) * replica.factor)

    if threads == 1:
        for replica in replicas:
            call(replica)
    else:
        run_threads([functools.partial(call, replica) for replica in replicas])
    # The part before a graph break is the same for all.
    assert backend.count == (10 if cls is Scaled else 11)


def test_control_with_torch_alone_the_ninth_replica_runs_eagerly() -> None:
    safecompile.uninstall()
    backend = CountingBackend()
    for factor in range(10):
        replica = Scaled(factor)
        replica.compile(backend=backend, dynamic=False)
        replica(torch.randn(3, 4))
    assert backend.count == LIMIT


def test_instances_with_a_guarded_method_each_have_the_limit() -> None:
    backend = CountingBackend()
    owners = [Owner(factor) for factor in range(10)]
    calls = [thread_safe_compile(owner.method, backend=backend, dynamic=False) for owner in owners]
    for owner, call in zip(owners, calls, strict=True):
        assert torch.equal(call(torch.ones(3)), torch.full((3,), float(owner.factor)))
    assert backend.count == 10


def test_functions_that_take_the_replica_as_an_argument_have_a_limit_for_each() -> None:
    backend = CountingBackend()
    step = thread_safe_compile(fresh(scaled_by), backend=backend, dynamic=False)
    for factor in range(10):
        model = Scaled(factor)
        for rows in (2, 3):
            x = torch.randn(rows, 4)
            assert torch.allclose(step(model, x), model.linear(x) * factor)
    assert backend.count == 20


def test_devices_each_have_the_limit() -> None:
    backend = CountingBackend()
    call = thread_safe_compile(fresh(), backend=backend, dynamic=False)
    for size in range(2, 8):
        call(torch.ones(size))
        call(torch.ones(size, device="meta"))
    assert backend.count == 12


@torch._dynamo.config.patch({f"accumulated_{RECOMPILE_LIMIT}": 16})
def test_more_replicas_than_all_code_may_have_graphs() -> None:
    backend = CountingBackend()
    replicas = [thread_safe_compile(Scaled(factor), backend=backend, dynamic=False) for factor in range(20)]
    for replica in replicas:
        replica(torch.randn(3, 4))
    assert backend.count == 20


@stops_for_one
@torch._dynamo.config.patch({f"accumulated_{RECOMPILE_LIMIT}": 16})
def test_replicas_that_are_gone_do_count_for_what_all_code_may_have() -> None:
    backend = CountingBackend()
    x = torch.randn(3, 4)

    def call_them() -> None:
        for factor in range(20):
            replica = thread_safe_compile(Scaled(factor), backend=backend, dynamic=False)
            assert torch.allclose(replica(x), replica.linear(x) * factor)

    with pytest.warns(RuntimeWarning, match="graphs for all, and the limit is 16: "):
        call_them()
    assert backend.count == 16


@stops_for_one
@torch._dynamo.config.patch({f"accumulated_{RECOMPILE_LIMIT}": 16})
def test_a_thread_for_each_request_does_not_compile_for_ever() -> None:
    backend = CountingBackend()
    call = thread_safe_compile(fresh(), backend=backend, dynamic=False)
    context = capture_context()

    def ask() -> None:
        for size in range(2, 22):
            run_threads([functools.partial(context.run, call, torch.ones(size))])

    with pytest.warns(RuntimeWarning, match=r"^function .* graphs for all, and the limit is 16: "):
        ask()
    assert backend.count == 16


@lacks((2, 13), "torch.compile(recompile_limit=)")
def test_a_plain_callable_keeps_the_limit_that_torch_was_given() -> None:
    safecompile.install()
    backend = CountingBackend()
    call = compile_plainly(fresh(), backend=backend, dynamic=False, recompile_limit=12)
    for size in range(2, 14):
        call(torch.ones(size))
    assert backend.count == 12


@lacks((2, 13), "torch.compile(isolate_recompiles=)")
def test_callables_whose_recompiles_are_isolated_each_have_the_limit() -> None:
    safecompile.install()
    backend, function = CountingBackend(), fresh()
    calls = [compile_plainly(function, backend=backend, dynamic=False, isolate_recompiles=True) for _ in range(2)]
    for size in range(2, 8):
        for call in calls:
            call(torch.ones(size))
    assert backend.count == 12


def test_arguments_may_contain_themselves() -> None:
    call = thread_safe_compile(fresh(first_of), backend="eager")
    values: list[Any] = [torch.ones(3)]
    values.append(values)
    assert torch.equal(call(values), torch.full((3,), 2.0))


@stops_for_one
def test_a_tensor_that_is_called_self_has_no_limit_of_its_own() -> None:
    backend = CountingBackend()
    call = thread_safe_compile(fresh(operator), backend=backend, dynamic=False)

    def ask() -> None:
        for size in range(2, 14):
            call(torch.ones(size))

    with pytest.warns(RuntimeWarning, match="the limit is 8"):
        ask()
    assert backend.count == LIMIT


# -------------------------------------------------------------------------------------------------- reaching the limit


@stops_for_one
def test_reaching_the_limit_is_one_warning_with_the_reasons_by_thread() -> None:
    backend = CountingBackend()
    call = thread_safe_compile(fresh(), backend=backend, dynamic=False)
    run_threads([lambda: call(torch.ones(2))])
    told: list[RecompileLimit] = []
    tell = told.append
    events.subscribe(tell, RecompileLimit)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for size in range(2, 14):
                x = torch.randn(size)
                assert torch.equal(call(x), x.sin() + 1)
    finally:
        events.unsubscribe(tell)
    assert backend.count == 1 + LIMIT
    [text] = [str(one.message) for one in caught]
    first, *reasons = text.splitlines()
    assert first.startswith(
        f"function ({__file__}:{function.__code__.co_firstlineno}) has 8 graphs for thread 'MainThread', and the limit is 8: "
    )
    assert len(reasons) == 9
    assert "  thread 'worker-0': first call" in reasons
    assert "  thread 'MainThread': argument x: size mismatch at index 0: expected 2, actual 3" in reasons
    assert [(one.function, one.limit, one.count) for one in told] == [("function", 8, 8)]


@stops_for_one
def test_one_threads_limit_stops_no_other_thread() -> None:
    backend = CountingBackend()
    call = thread_safe_compile(fresh(), backend=backend, dynamic=False)
    reached = threading.Event()

    def greedy() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for size in range(2, 14):
                call(torch.ones(size))
        reached.set()

    def other() -> None:
        assert reached.wait(60)
        for size in range(20, 24):
            x = torch.randn(size)
            assert torch.equal(call(x), x.sin() + 1)

    run_threads([greedy, other])
    assert backend.count == LIMIT + 4


@stops_for_one
def test_after_a_reset_there_is_another_warning() -> None:
    call = thread_safe_compile(fresh(), backend="eager", dynamic=False, recompile_limit=1)
    for _ in range(2):
        call(torch.ones(2))
        with pytest.warns(RuntimeWarning, match="the limit is 1"):
            call(torch.ones(3))
        call(torch.ones(4))  # a second warning would be an error
        safecompile.reset()


def test_a_limit_of_ones_own() -> None:
    backend = CountingBackend()
    call = thread_safe_compile(fresh(), backend=backend, dynamic=False, recompile_limit=12)
    for size in range(2, 14):
        call(torch.ones(size))
    assert backend.count == 12


def test_with_fullgraph_the_limit_is_an_error_each_time() -> None:
    call = thread_safe_compile(fresh(), backend="eager", dynamic=False, fullgraph=True, recompile_limit=2)
    call(torch.ones(2))
    call(torch.ones(3))
    exceptions = torch._dynamo.exc
    names = ("FailOnRecompileLimitHit", "RecompileLimitExceeded")  # in newer and in older torch
    errors = tuple(getattr(exceptions, name) for name in names if hasattr(exceptions, name))
    for size in (4, 5):
        with pytest.raises(errors):
            call(torch.ones(size))
    call(torch.ones(2))


@stops_for_one
def test_beyond_the_limit_no_call_waits_for_a_compile() -> None:
    call = thread_safe_compile(fresh(), backend="eager", dynamic=False, recompile_limit=1)
    call(torch.ones(2))
    with pytest.warns(RuntimeWarning, match="and the limit is 1: "):
        call(torch.ones(3))
    backend = CountingBackend(gated=True)
    held = thread_safe_compile(fresh(), backend=backend)
    thread = threading.Thread(target=held, args=(torch.ones(2),))
    thread.start()
    assert backend.entered.wait(60)
    x = torch.randn(5)
    assert torch.equal(call(x), x.sin() + 1)
    backend.release.set()
    thread.join(60)


@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True])
def test_a_limit_that_is_none_is_refused_at_once(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^recompile_limit is how many graphs a function may have, 1 or more, not "):
        thread_safe_compile(fresh(), recompile_limit=value)
