"""A call whose code is compiled takes no lock: it goes on while another thread compiles."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from safecompile import fx_trace_lock, thread_safe_compile
from tests.helpers.backends import CountingBackend
from tests.helpers.subprocess_run import run_forked
from tests.helpers.threads import run_threads

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("nothing_compiled")

CALLS = 1000
WARM_THREADS = 3


def cold(x: torch.Tensor) -> torch.Tensor:
    return x.cos() - 1


def simple(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


def broken(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    torch._dynamo.graph_break()
    y = helper(y)
    torch._dynamo.graph_break()
    return y + 1


def helper(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    torch._dynamo.graph_break()
    return y * 2


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu()


class Owner:
    factor = 2

    @thread_safe_compile(backend="eager")
    def method(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def hooked() -> nn.Module:
    module = nn.Sequential(Module(), Module())
    module.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    module.register_forward_hook(lambda _, args, output: output * 2)
    return thread_safe_compile(module, backend="eager")


def nested(x: torch.Tensor) -> torch.Tensor:
    return _inner(x) + 1


_inner = thread_safe_compile(simple, backend="eager")


def backward_too(x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    _with_backward(x).sum().backward()
    assert x.grad is not None
    return x.grad


_with_backward = thread_safe_compile(lambda x: x.sin() * x, backend="aot_eager")

WARM: dict[str, Callable[[], Callable[[torch.Tensor], Any]]] = {
    "function": lambda: thread_safe_compile(simple, backend="eager"),
    "fullgraph": lambda: thread_safe_compile(simple, backend="eager", fullgraph=True),
    "graph breaks": lambda: thread_safe_compile(broken, backend="eager"),
    "method": lambda: Owner().method,
    "bound method": lambda: thread_safe_compile(Module().forward, backend="eager"),
    "module": lambda: thread_safe_compile(Module(), backend="eager"),
    "module with hooks": hooked,
    "guarded in guarded": lambda: thread_safe_compile(nested, backend="eager"),
    "plain torch.compile": lambda: torch.compile(simple, backend="eager"),
    "forward and backward": lambda: backward_too,
}


def compile_beside(warm: list[Callable[[int], Any]], *, around: Any = None, limit: float = 30.0) -> None:
    """Hold a compile in one thread until each of the others has made all its warm calls."""
    backend = CountingBackend(gated=True)
    f = thread_safe_compile(cold, backend=backend)
    finished = threading.Semaphore(0)

    def compile_it() -> None:
        if around is None:
            f(torch.ones(4))
            return
        with around:
            f(torch.ones(4))

    def call(index: int) -> None:
        assert backend.entered.wait(30)
        for step in range(CALLS):
            warm[index](step)
        finished.release()

    def open_the_gate() -> None:
        try:
            for _ in warm:
                assert finished.acquire(timeout=limit), "a warm call waits for the compile"
        finally:
            backend.release.set()

    workers = [compile_it, open_the_gate, *[lambda index=index: call(index) for index in range(len(warm))]]
    run_threads(workers)
    assert backend.count == 1


@pytest.mark.parametrize("kind", WARM)
def test_a_compile_that_waits_for_1000_warm_calls_of_other_threads_ends(kind: str) -> None:
    f, x = WARM[kind](), torch.randn(2, 4)
    want = f(x)
    assert torch.equal(f(x), want)

    def call(step: int) -> None:
        # Compared now and then: a comparison costs more than a call.
        assert step % 100 or torch.equal(f(x), want)
        f(x)

    compile_beside([call] * WARM_THREADS)


def test_threads_with_functions_of_their_own_go_on_beside_a_compile() -> None:
    x = torch.randn(2, 4)
    functions = [make() for make in WARM.values()]
    for f in functions:
        f(x)
        f(x)
    compile_beside([functools.partial(_call, f, x) for f in functions])


def _call(f: Callable[[torch.Tensor], Any], x: torch.Tensor, _: int) -> None:
    f(x)


def test_a_function_with_several_graphs_goes_on_beside_a_compile_in_all_threads() -> None:
    # In a process of its own: threads that hang would still be inside Dynamo when the next test resets it.
    run_forked(
        """
        import os, sys, torch
        from safecompile import thread_safe_compile
        from tests.test_warm_calls import compile_beside, simple

        f = thread_safe_compile(simple, backend="eager", dynamic=False)
        inputs = [torch.randn(rows, 4) for rows in range(2, 8)]
        for x in inputs:
            f(x)
        try:
            compile_beside([lambda k, i=i: f(inputs[(i + k) % len(inputs)]) for i in range(7)], limit=15)
        except AssertionError as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(1)
        """
    ).check()


def test_the_compile_of_a_new_shape_does_not_stop_the_functions_own_warm_shapes() -> None:
    backend = CountingBackend()
    f = thread_safe_compile(simple, backend=_gated_for(8, backend), dynamic=False)
    x = torch.randn(2, 4)
    f(x)
    warm_done = threading.Event()

    def warm() -> None:
        assert backend.entered.wait(30)
        for _ in range(CALLS):
            f(x)
        warm_done.set()
        backend.release.set()

    run_threads([lambda: f(torch.randn(8, 4)), warm])
    assert warm_done.is_set()


def _gated_for(rows: int, gate: CountingBackend) -> Any:
    def compile_graph(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        if example_inputs[0].shape[0] == rows:
            gate.entered.set()
            assert gate.release.wait(30)
        return gm.forward

    return compile_graph


def test_the_lock_is_not_held_while_compiled_code_runs() -> None:
    seen: list[bool] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        def run(*args: Any) -> Any:
            seen.append(fx_trace_lock.owned() or fx_trace_lock.statistics().locked)
            return gm.forward(*args)

        return run

    f = thread_safe_compile(broken, backend=backend)
    x = torch.randn(4)
    f(x)
    f(x)
    assert seen and not any(seen)


def test_two_threads_that_meet_inside_compiled_code_do_not_wait_for_each_other() -> None:
    barrier = threading.Barrier(2)

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        def run(*args: Any) -> Any:
            barrier.wait(30)  # as a collective would
            return gm.forward(*args)

        return run

    f, g = (thread_safe_compile(function, backend=backend) for function in (simple, cold))
    x = torch.randn(4)
    run_threads([lambda: f(x), lambda: g(x)])


def test_a_lock_around_the_calls_stops_the_warm_calls() -> None:
    """The negative control: the usual hand-written cure."""
    lock = threading.RLock()
    f, x = thread_safe_compile(simple, backend="eager"), torch.randn(2, 4)
    f(x)

    def call(_: int) -> None:
        # A limit in the place of a hang; it passes only when nobody holds the lock.
        if not lock.acquire(timeout=2):
            raise TimeoutError("a warm call waits for the compile")
        try:
            f(x)
        finally:
            lock.release()

    with pytest.raises(AssertionError, match="a warm call waits for the compile"):
        compile_beside([call], around=lock, limit=4)
