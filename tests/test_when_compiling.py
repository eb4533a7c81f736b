"""`when_compiling=`: what a call does that needs a graph while another thread compiles."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import safecompile
from safecompile import CompileInProgressError, checkpoint, fx_trace_lock, statistics, thread_safe_compile
from safecompile._core import events
from safecompile.observe import EagerRun
from tests.helpers.backends import AotCountingBackend, CountingBackend
from tests.helpers.counts import counted
from tests.helpers.threads import run_threads, wait_until
from tests.helpers.torch_version import lacks

pytestmark = pytest.mark.usefixtures("nothing_compiled")

# torch 2.6 would never compile a function again that it was told to run as it is; there the call waits.
runs_once = lacks((2, 7), "a frame that runs eagerly this once")


def sin_exp(x: Tensor) -> Tensor:
    return x.sin().exp()


def broken(x: Tensor) -> Tensor:
    y = x.sin()
    torch._dynamo.graph_break()
    y = helper(y)
    torch._dynamo.graph_break()
    return y + 1


def helper(x: Tensor) -> Tensor:
    return x * 2


class Method:
    def method(self, x: Tensor) -> Tensor:
        return x.sin().exp()


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


def hooked() -> nn.Module:
    module = nn.Sequential(Module(), Module())
    module.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    return module


FORMS: dict[str, Callable[[], Any]] = {
    "function": lambda: sin_exp,
    "method": lambda: Method().method,
    "module": Module,
    "module with hooks": hooked,
    "graph breaks": lambda: broken,
}


def cold(x: Tensor) -> Tensor:
    return x.cos() - 1


@contextmanager
def a_compile_elsewhere(function: Callable[[Tensor], Tensor] = cold) -> Iterator[CountingBackend]:
    """Hold the compile of another function, in a thread of its own, until the end of the block or its `release`."""
    backend = CountingBackend(gated=True)
    held = thread_safe_compile(function, backend=backend)
    thread = threading.Thread(target=held, args=(torch.ones(7),), name="compiling")
    thread.start()
    try:
        assert backend.entered.wait(60)
        yield backend
    finally:
        backend.release.set()
        thread.join(60)
    assert not thread.is_alive()


# ------------------------------------------------------------------------------------------------------------- eager


@runs_once
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fullgraph", [False, True])
def test_eager_answers_while_another_thread_compiles(form: str, fullgraph: bool) -> None:
    if fullgraph and form in {"graph breaks", "module with hooks"}:
        pytest.skip("not one graph")
    original = FORMS[form]()
    x = torch.randn(3, 4)
    expected = original(x)
    backend = CountingBackend()
    f = thread_safe_compile(original, backend=backend, when_compiling="eager", fullgraph=fullgraph)
    with a_compile_elsewhere():
        assert torch.equal(f(x), expected)
        assert backend.count == 0
    assert torch.equal(f(x), expected)
    compiled = backend.count
    assert compiled >= 1
    assert torch.equal(f(x), expected)
    assert backend.count == compiled


@pytest.mark.parametrize("form", FORMS)
def test_control_a_call_that_waits_answers_after_the_compile_only(form: str) -> None:
    f = thread_safe_compile(FORMS[form](), backend="eager")
    answered = threading.Event()

    def ask() -> None:
        f(torch.randn(3, 4))
        answered.set()

    with a_compile_elsewhere():
        thread = threading.Thread(target=ask, name="asking")
        thread.start()
        wait_until(lambda: any(one.thread == "asking" for one in statistics().lock.waiters))
        assert not answered.is_set()
    thread.join(60)
    assert answered.is_set()


@runs_once
def test_requests_are_answered_while_the_first_of_them_compiles() -> None:
    answers = threading.Semaphore(0)

    def backend(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        for _ in range(200):
            assert answers.acquire(timeout=60)
        return gm.forward

    f = thread_safe_compile(sin_exp, backend=backend, when_compiling="eager")
    x = torch.randn(5)
    expected = sin_exp(x)
    compiled = threading.Event()

    def serve(_: int) -> int:
        served = 0
        while not compiled.is_set():
            assert torch.equal(f(x), expected)
            answers.release()
            served += 1
            if statistics().compiled > before:
                compiled.set()
        return served

    safecompile.install()
    before = statistics().compiled
    assert sum(run_threads(serve, 4)) >= 200
    assert counted(f).compiles == 1
    assert counted(f).eager_runs >= 200


@runs_once
@pytest.mark.parametrize("when", ["eager", "error"])
def test_what_follows_a_graph_break_runs_eagerly_and_cannot_be_refused(when: Any) -> None:
    x = torch.randn(4)
    reached, go_on = threading.Event(), threading.Event()

    def stops(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        pause()
        return y.cos() + 1

    @torch._dynamo.disable
    def pause() -> None:
        reached.set()
        assert go_on.wait(60)

    backend = CountingBackend()
    f = thread_safe_compile(stops, backend=backend, when_compiling=when)
    results: list[Tensor] = []
    thread = threading.Thread(target=lambda: results.append(f(x)))
    thread.start()
    assert reached.wait(60)
    before = backend.count
    with a_compile_elsewhere():
        go_on.set()
        thread.join(60)
        assert not thread.is_alive()
        assert backend.count == before
    assert torch.equal(results[0], x.sin().cos() + 1)


@runs_once
def test_a_warm_call_is_no_eager_run() -> None:
    f = thread_safe_compile(sin_exp, backend="eager", when_compiling="eager")
    f(torch.ones(4))
    before = counted(f).eager_runs
    with a_compile_elsewhere():
        f(torch.ones(4))
    assert counted(f).eager_runs == before


def test_the_only_thread_compiles() -> None:
    backend = CountingBackend()
    f = thread_safe_compile(sin_exp, backend=backend, when_compiling="eager")
    f(torch.ones(4))
    assert backend.count == 1


def test_a_call_inside_a_compile_of_the_same_thread_compiles() -> None:
    inner = thread_safe_compile(sin_exp, backend="eager", when_compiling="error")

    def backend(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        inner(torch.ones(3))
        return gm.forward

    thread_safe_compile(cold, backend=backend, when_compiling="error")(torch.ones(3))
    assert counted(inner).compiles == 1


@runs_once
def test_the_innermost_guarded_call_decides() -> None:
    inner = thread_safe_compile(sin_exp, backend="eager", when_compiling="error")

    def outer(x: Tensor) -> Tensor:
        return inner(x + 1) + 1

    f = thread_safe_compile(outer, backend="eager", when_compiling="eager")
    with a_compile_elsewhere(), pytest.raises(CompileInProgressError, match=r"^sin_exp \(.*\) needs a graph"):
        f(torch.ones(3))


def test_in_a_checkpointed_region_an_eager_call_waits_for_its_graph() -> None:
    backend = AotCountingBackend()
    f = thread_safe_compile(sin_exp, backend=backend, when_compiling="eager")
    x = torch.randn(4, requires_grad=True)
    results: list[Tensor] = []
    thread = threading.Thread(target=lambda: results.append(checkpoint(f, x)), name="region")
    with a_compile_elsewhere():
        thread.start()
        wait_until(lambda: any(one.thread == "region" for one in statistics().lock.waiters))
    thread.join(60)
    results[0].sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, x.cos() * x.sin().exp())
    assert backend.forward.count >= 1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_in_a_region_of_torchs_checkpoint_an_eager_call_waits_too(use_reentrant: bool) -> None:
    f = thread_safe_compile(sin_exp, backend="aot_eager", when_compiling="eager")
    x = torch.randn(4, requires_grad=True)
    results: list[Tensor] = []

    def region() -> None:
        results.append(torch.utils.checkpoint.checkpoint(f, x, use_reentrant=use_reentrant))

    thread = threading.Thread(target=region, name="region")
    with a_compile_elsewhere():
        thread.start()
        wait_until(lambda: any(one.thread == "region" for one in statistics().lock.waiters))
    thread.join(60)
    results[0].sum().backward()
    assert counted(f).eager_runs == 0


def test_the_first_backward_waits() -> None:
    forward = thread_safe_compile(sin_exp, backend=AotCountingBackend(), when_compiling="eager")
    x = torch.randn(4, requires_grad=True)
    loss = forward(x).sum()
    thread = threading.Thread(target=loss.backward, name="backward")
    with a_compile_elsewhere():
        thread.start()
        wait_until(lambda: any(one.thread == "backward" for one in statistics().lock.waiters))
        assert x.grad is None
    thread.join(60)
    assert x.grad is not None


@runs_once
def test_gradients_of_an_eager_run_are_right() -> None:
    f = thread_safe_compile(sin_exp, backend="aot_eager", when_compiling="eager")
    x = torch.randn(4, requires_grad=True)
    with a_compile_elsewhere():
        f(x).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, x.cos() * x.sin().exp())


@runs_once
def test_while_a_thread_holds_the_lock_itself_calls_run_eagerly() -> None:
    f = thread_safe_compile(sin_exp, backend="eager", when_compiling="eager")
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with fx_trace_lock:
            held.set()
            assert done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    f(torch.ones(4))
    done.set()
    thread.join(60)
    assert (counted(f).eager_runs, counted(f).compiles) == (1, 0)


@runs_once
def test_an_eager_run_is_told_with_who_compiles() -> None:
    f = thread_safe_compile(sin_exp, backend="eager", when_compiling="eager")
    told: list[EagerRun] = []
    tell = told.append
    events.subscribe(tell, EagerRun)
    try:
        with a_compile_elsewhere():
            f(torch.ones(4))
    finally:
        events.unsubscribe(tell)
    assert [one.function for one in told] == ["sin_exp"]
    assert "thread 'compiling' has held the FX-trace lock for" in told[0].reason
    assert "compiling cold (" in told[0].reason


# ------------------------------------------------------------------------------------------------------------- error


@pytest.mark.parametrize("form", FORMS)
def test_error_names_the_function_and_who_compiles(form: str) -> None:
    f = thread_safe_compile(FORMS[form](), backend="eager", when_compiling="error")
    with a_compile_elsewhere(), pytest.raises(CompileInProgressError) as caught:
        f(torch.randn(3, 4))
    first = str(caught.value).splitlines()[0]
    assert ") needs a graph for these arguments, and thread 'compiling' has held the FX-trace lock for" in first
    assert "(compiling cold (" in first
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (type(copied), str(copied)) == (CompileInProgressError, str(caught.value))
    f(torch.randn(3, 4))


def test_error_is_not_raised_by_a_warm_call() -> None:
    f = thread_safe_compile(sin_exp, backend="eager", when_compiling="error")
    f(torch.ones(4))
    with a_compile_elsewhere():
        f(torch.ones(4))


# ------------------------------------------------------------------------------------------------- counts and options


def test_a_call_that_waits_is_counted_with_its_seconds() -> None:
    f = thread_safe_compile(sin_exp, backend="eager")
    thread = threading.Thread(target=f, args=(torch.ones(4),), name="asking")
    with a_compile_elsewhere():
        thread.start()
        wait_until(lambda: any(one.thread == "asking" for one in statistics().lock.waiters))
    thread.join(60)
    counts = counted(f)
    assert (counts.calls, counts.waits, counts.compiles) == (1, 1, 1)
    assert counts.waited_seconds > 0


@pytest.mark.parametrize("value", ["", "never", None, True, 1])
def test_another_value_is_refused_at_once(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^when_compiling is one of 'wait', 'eager', 'error', not "):
        thread_safe_compile(sin_exp, when_compiling=value)
    with pytest.raises(ValueError, match=r"^when_compiling is one of"):
        thread_safe_compile(when_compiling=value)


def test_modules_with_other_values_do_not_share_their_guarded_class() -> None:
    one = thread_safe_compile(Module(), backend="eager", when_compiling="eager")
    other = thread_safe_compile(Module(), backend="eager")
    assert type(one) is not type(other)
