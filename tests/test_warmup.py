"""`warmup`: afterwards the same call compiles nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from safecompile import UnsupportedCallableError, statistics, thread_safe_compile, warmup
from tests.helpers.backends import AotCountingBackend, CountingBackend
from tests.helpers.threads import run_threads, switch_interval

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Pair(NamedTuple):
    one: Tensor
    other: Any


def sin_exp(x: Tensor, scale: float = 1.0) -> Tensor:
    return (x * scale).sin().exp()


def ones(*size: int) -> Tensor:
    return torch.ones(size or (4,), requires_grad=True)


# ---------------------------------------------------------------------------------------------------------- promises


def test_afterwards_the_same_call_compiles_nothing() -> None:
    backend = CountingBackend()
    f = thread_safe_compile(sin_exp, backend=backend)
    warmup(f, (torch.ones(4),))
    assert backend.count == 1
    f(torch.ones(4))
    assert backend.count == 1


def test_afterwards_forward_and_backward_compile_nothing() -> None:
    backend = AotCountingBackend()
    f = thread_safe_compile(sin_exp, backend=backend)
    warmup(f, (ones(),), backward=True)
    assert (backend.forward.count, backend.backward.count) == (1, 1)
    x = ones()
    f(x).sum().backward()
    assert (backend.forward.count, backend.backward.count) == (1, 1)
    assert x.grad is not None and torch.allclose(x.grad, x.detach().cos() * x.detach().sin().exp())


def test_control_without_backward_the_first_backward_compiles() -> None:
    backend = AotCountingBackend()
    f = thread_safe_compile(sin_exp, backend=backend)
    warmup(f, (ones(),))
    assert backend.backward.count == 0
    f(ones()).sum().backward()
    assert backend.backward.count == 1


def test_afterwards_threads_compile_nothing_and_never_take_the_lock() -> None:
    backend = AotCountingBackend()
    f = thread_safe_compile(sin_exp, backend=backend)
    warmup(f, (ones(),), backward=True)
    before = statistics().lock.acquisitions

    def work(_: int) -> None:
        for _ in range(5):
            f(ones()).sum().backward()

    with switch_interval():
        run_threads(work, 4)
    assert (backend.forward.count, backend.backward.count) == (1, 1)
    assert statistics().lock.acquisitions == before


def test_no_grad_attribute_changes() -> None:
    model = thread_safe_compile(nn.Linear(4, 4), backend="aot_eager")
    x, there = ones(2, 4), torch.full((4,), 7.0)
    model.bias.grad = there
    warmup(model, (x,), backward=True)
    assert model.weight.grad is None and x.grad is None
    assert model.bias.grad is there and torch.equal(there, torch.full((4,), 7.0))


def test_a_module_is_warmed_up() -> None:
    backend = AotCountingBackend()
    model = thread_safe_compile(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), backend=backend)
    report = warmup(model, [torch.ones(2, 4)], backward=True)
    model(torch.ones(2, 4)).sum().backward()
    assert (report.graphs, backend.forward.count, backend.backward.count) == (1, 1, 1)


def test_keyword_arguments_are_passed() -> None:
    backend = CountingBackend()
    f = thread_safe_compile(sin_exp, backend=backend)
    warmup(f, (torch.ones(4),), kwargs={"scale": 2.0})
    f(torch.ones(4), scale=2.0)
    assert backend.count == 1
    f(torch.ones(4), scale=3.0)
    assert backend.count == 2


def test_keyword_arguments_alone_are_enough() -> None:
    f = thread_safe_compile(sin_exp, backend="eager")
    assert warmup(f, (), kwargs={"x": torch.ones(4)}).graphs == 1


def test_a_function_that_calls_several_guarded_callables() -> None:
    backend = AotCountingBackend()
    f = thread_safe_compile(sin_exp, backend=backend)
    model = thread_safe_compile(nn.Linear(4, 4), backend=backend)

    def step(x: Tensor) -> Tensor:
        return model(f(x)) + f(x.view(2, 2)).sum()

    report = warmup(step, (ones(),), backward=True)
    compiled = (backend.forward.count, backend.backward.count)
    assert report.graphs == compiled[0] == 3
    step(ones()).sum().backward()
    assert (backend.forward.count, backend.backward.count) == compiled


def test_the_parts_of_a_graph_broken_function_count_each() -> None:
    backend = CountingBackend()

    @thread_safe_compile(backend=backend)
    def f(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    assert warmup(f, (torch.ones(4),)).graphs == backend.count == 2


CONTAINERS: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda y: (y, None, 3),
    "dict in list": lambda y: [{"y": y, "name": "x"}],
    "named tuple": lambda y: Pair(y, "other"),
    "beside one without grad": lambda y: (y, y.detach(), torch.ones(3, dtype=torch.int64)),
    "beside a leaf": lambda y: (y, torch.ones(3, requires_grad=True)),
    "two": lambda y: (y, y.sum()),
    "complex": lambda y: torch.view_as_complex(torch.stack([y, y], dim=-1)),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_outputs_may_be_in_containers(container: str) -> None:
    backend = AotCountingBackend()
    f = thread_safe_compile(sin_exp, backend=backend)

    def step(x: Tensor) -> Any:
        return CONTAINERS[container](f(x))

    warmup(step, (ones(),), backward=True)
    assert (backend.forward.count, backend.backward.count) == (1, 1)


def test_a_tensor_that_needs_no_grad_among_the_inputs_is_no_error() -> None:
    f = thread_safe_compile(lambda x, n: x[:n].sin(), backend="aot_eager")
    warmup(f, (ones(), 2), backward=True)


def test_unused_parameters_are_no_error() -> None:
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def step(x: Tensor) -> Tensor:
        y: Tensor = model[0](x)
        return y

    warmup(step, (torch.ones(4),), backward=True)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_another_warm_up_finds_nothing_to_do() -> None:
    f = thread_safe_compile(sin_exp, backend="aot_eager")
    assert warmup(f, (ones(),), backward=True).graphs == 1
    assert warmup(f, (ones(),), backward=True).graphs == 0


# ---------------------------------------------------------------------------------------------------------- report


def test_the_report_names_the_thread_the_graphs_and_the_time() -> None:
    f = thread_safe_compile(sin_exp, backend="eager")
    (report,) = run_threads([lambda: warmup(f, (torch.ones(4),))])
    assert (report.thread, report.graphs) == ("worker-0", 1)
    assert report.seconds > 0
    with pytest.raises(FrozenInstanceError):
        report.graphs = 3  # type: ignore[misc]


def test_the_report_counts_the_calling_thread_only() -> None:
    backend = CountingBackend()
    f = thread_safe_compile(sin_exp, backend=backend)
    start = threading.Barrier(4)

    def work(index: int) -> int:
        start.wait(30)
        return warmup(f, (torch.ones(4),)).graphs

    with switch_interval():
        graphs = run_threads(work, 4)
    assert sorted(graphs) == [0, 0, 0, 1]
    assert backend.count == 1


# ---------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("thing", [None, 3, "f"])
def test_what_cannot_be_called_is_refused(thing: Any) -> None:
    with pytest.raises(UnsupportedCallableError, match=f"warmup cannot call {type(thing).__name__}"):
        warmup(thing, ())


@pytest.mark.parametrize("inputs", [torch.ones(4), {"x": 1}, "x", None, iter(())])
def test_inputs_that_are_no_tuple_or_list_are_refused_before_any_work(inputs: Any) -> None:
    called: list[Any] = []
    with pytest.raises(TypeError, match="as a tuple or list, not") as caught:
        warmup(lambda *args: called.append(args), inputs)
    assert "(x,)" in str(caught.value)
    assert not called


@pytest.fixture(params=["grad mode off", "no input needs grad", "no tensor"])
def without_grad(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Tensor]]:
    if request.param == "grad mode off":
        with torch.no_grad():
            yield torch.sin, ones()
    elif request.param == "no input needs grad":
        yield torch.sin, torch.ones(4)
    else:
        yield (lambda x: "text"), ones()


def test_a_backward_of_what_needs_no_grad_is_refused(without_grad: tuple[Any, Tensor]) -> None:
    fn, x = without_grad
    with pytest.raises(ValueError, match="no output needs a gradient") as caught:
        warmup(fn, (x,), backward=True)
    assert "leave backward out" in str(caught.value)


def test_an_error_of_the_function_reaches_the_caller_and_the_next_warm_up_works() -> None:
    backend = CountingBackend()
    f = thread_safe_compile(sin_exp, backend=backend)
    with pytest.raises(TypeError):
        warmup(f, (torch.ones(4), torch.ones(4), torch.ones(4)))
    assert warmup(f, (torch.ones(4),)).graphs == 1


# ---------------------------------------------------------------------------------------------------------- limits


def test_an_input_with_a_graph_of_its_own_can_still_be_used() -> None:
    backend = AotCountingBackend()
    f = thread_safe_compile(sin_exp, backend=backend)
    x = ones()
    h = x.exp()
    warmup(f, (h,), backward=True)
    assert backend.backward.count == 1
    f(h).sum().backward()
    assert x.grad is not None
    assert (backend.forward.count, backend.backward.count) == (1, 1)


def test_inputs_with_one_graph_behind_them_can_still_be_used() -> None:
    f = thread_safe_compile(lambda a, b: (a * b).exp(), backend="aot_eager")
    x = ones(2, 4)
    halves = x.exp().unbind()
    warmup(f, halves, backward=True)
    f(*halves).sum().backward()
    assert x.grad is not None


def test_a_keyword_with_a_graph_of_its_own_can_still_be_used() -> None:
    f = thread_safe_compile(lambda a, *, b: (a * b["x"]).exp(), backend="aot_eager")
    x = ones()
    b = {"x": x.exp()}
    warmup(f, (ones(),), kwargs={"b": b}, backward=True)
    f(ones(), b=b).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("leaf", ["the input", "a parameter", "one made inside"])
def test_outputs_that_are_leaves_have_no_backward_to_compile(leaf: str) -> None:
    parameter = nn.Parameter(torch.ones(4))
    functions: dict[str, Callable[[Tensor], Any]] = {
        "the input": lambda x: {"y": x},
        "a parameter": lambda x: parameter,
        "one made inside": lambda x: [ones()],
    }
    with pytest.raises(ValueError, match="no output needs a gradient"):
        warmup(functions[leaf], (ones(),), backward=True)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.variable = "a name that torch's own leaves have, too"
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


def test_an_autograd_function_may_keep_what_it_likes_in_its_context() -> None:
    warmup(Doubled.apply, (ones(),), backward=True)
