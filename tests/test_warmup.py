"""`warmup` in the calling thread: afterwards the same calls compile nothing. In a pool: see test_warmup_in_executors."""

from __future__ import annotations

import _thread
import logging
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from safecompile import UnsupportedCallableError, fx_trace_lock, statistics, thread_safe_compile, warmup
from safecompile._core.guarded import Guarded
from safecompile.testing import max_compiles, no_compiles
from tests.helpers.backends import AotCountingBackend, CountingBackend
from tests.helpers.threads import run_threads, switch_interval, wait_until

pytestmark = pytest.mark.usefixtures("nothing_compiled")


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


# ---------------------------------------------------------------------------------------------------------- sets, modes


def test_each_of_several_sets_of_inputs_is_called() -> None:
    f = thread_safe_compile(sin_exp, backend="eager", dynamic=False)
    report = warmup(f, [(torch.ones(3),), (torch.ones(3).double(),), (torch.ones(2, 5),)])
    assert report.graphs == 3
    with no_compiles():
        for x in (torch.ones(3), torch.ones(3).double(), torch.ones(2, 5)):
            f(x)


def test_afterwards_sizes_that_torch_makes_dynamic_compile_nothing() -> None:
    f = thread_safe_compile(sin_exp, backend="eager")
    warmup(f, [(torch.ones(size),) for size in (3, 4, 5)])
    with no_compiles():
        for size in (5, 3, 4):
            f(torch.ones(size))


def test_each_set_may_have_keyword_arguments_of_its_own() -> None:
    calls: list[Any] = []

    def record(*args: Any, **kwargs: Any) -> None:
        calls.append((args, kwargs))

    warmup(record, [(1,), (2,)], kwargs=[{"a": 3}, {}])
    warmup(record, [(1,), (2,)], kwargs={"b": 4})
    warmup(record, (1,), kwargs=[{"c": 5}])
    expected = [((1,), {"a": 3}), ((2,), {}), ((1,), {"b": 4}), ((2,), {"b": 4}), ((1,), {"c": 5})]
    assert calls == expected


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ([], [()]),
        ((), [()]),
        ([1, (2,)], [(1, (2,))]),
        (((1,), (2,)), [((1,), (2,))]),
        ([Pair(torch.ones(1), 2)], [(Pair,)]),
        ([torch.Size([1, 2])], [((1, 2),)]),
        ([(1,), ()], [(1,), ()]),
    ],
    ids=[
        "no input",
        "no input in a tuple",
        "a tuple among others",
        "tuples in a tuple",
        "named tuple",
        "size",
        "two sets",
    ],
)
def test_what_is_one_set_of_inputs_and_what_are_several(inputs: Any, expected: list[Any]) -> None:
    calls: list[Any] = []
    warmup(lambda *args: calls.append(args), inputs)
    assert [tuple(Pair if isinstance(one, Pair) else one for one in call) for call in calls] == expected


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(
    ("grad", "expected"), [(None, None), (True, [True]), (False, [False]), ("both", [False, True])]
)
def test_calls_are_made_in_the_grad_modes_that_are_asked_for(grad: Any, own: bool, expected: Any) -> None:
    modes: list[bool] = []
    with torch.set_grad_enabled(own):
        warmup(lambda: modes.append(torch.is_grad_enabled()), (), grad=grad)
        assert torch.is_grad_enabled() == own
    assert modes == (expected or [own])


def test_the_backward_is_run_of_the_calls_with_grad() -> None:
    backend = AotCountingBackend()
    f = thread_safe_compile(sin_exp, backend=backend)
    assert warmup(f, (ones(),), backward=True, grad="both").graphs == 2
    assert (backend.forward.count, backend.backward.count) == (2, 1)
    with no_compiles():
        f(ones()).sum().backward()
        with torch.no_grad():
            f(ones())


def test_control_one_grad_mode_leaves_the_other_to_compile() -> None:
    f = thread_safe_compile(sin_exp, backend="aot_eager")
    warmup(f, (ones(),), backward=True)
    with max_compiles(1) as limit, torch.no_grad():
        f(ones())
    assert [one.reasons for one in limit.compiles] == [("grad mode changed",)]


# ---------------------------------------------------------------------------------------------------------- devices


def test_the_tensors_are_copied_to_each_device() -> None:
    x, y, calls = torch.ones(2, 3).t().requires_grad_(), ones(2), list[Any]()
    h = y.exp()

    def record(*args: Any, **kwargs: Any) -> None:
        calls.append((args, kwargs))

    warmup(record, (x, {"list": [h, 7]}, x), kwargs={"z": torch.ones(1)}, devices=["cpu", "meta"])
    assert [args[0].device.type for args, _ in calls] == ["cpu", "meta"]
    for args, kwargs in calls:
        first, nested, third = args
        assert first is third and first is not x and first.stride() == x.stride() == (1, 3)
        assert {one.device for one in (nested["list"][0], kwargs["z"])} == {first.device}
        assert [one.requires_grad for one in (first, nested["list"][0], kwargs["z"])] == [True, True, False]
        assert nested["list"][0].is_leaf and nested["list"][1] == 7


def test_what_a_call_changes_in_a_copy_stays_there() -> None:
    x = torch.ones(3)
    warmup(lambda x: x.add_(1), (x,), devices=["cpu"])
    assert torch.equal(x, torch.ones(3))


def test_afterwards_calls_on_each_device_compile_nothing() -> None:
    f = thread_safe_compile(sin_exp, backend="aot_eager")
    assert warmup(f, (ones(),), backward=True, devices=["cpu", torch.device("meta")]).graphs == 2
    with no_compiles():
        for device in ("meta", "cpu"):
            f(torch.ones(4, device=device, requires_grad=True)).sum().backward()


def test_each_device_may_have_a_replica() -> None:
    calls: list[Any] = []
    replicas = {device: lambda x, device=device: calls.append((device, x.device.type)) for device in ("cpu:0", "meta")}
    warmup(replicas, (torch.ones(1),), devices=["meta", "cpu"])
    assert calls == [("meta", "meta"), ("cpu:0", "cpu")]


def test_the_device_is_the_current_one_in_its_calls_also_when_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[int | None] = [5]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current[0])
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: current.__setitem__(0, index))
    seen: list[Any] = []

    def record(x: Tensor) -> None:
        seen.append((x.device.type, current[0]))

    warmup(record, (torch.ones(1),), devices=["meta", "cpu"])
    assert (seen, current) == ([("meta", None), ("cpu", 5)], [5])  # that device has no index
    with pytest.raises(ZeroDivisionError):
        warmup(lambda x: 1 // 0, (torch.ones(1),), devices=["meta"])
    assert current == [5]


# ---------------------------------------------------------------------------------------------------------- progress


def test_progress_is_told_after_each_call() -> None:
    told: list[Any] = []
    warmup(
        lambda x: told.append("call"),
        [(torch.ones(1),), (torch.ones(2),)],
        grad="both",
        devices=["cpu", "meta"],
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == [one for number in range(1, 9) for one in ("call", (number, 8))]


def test_an_error_of_progress_ends_the_warm_up() -> None:
    calls: list[int] = []

    def progress(done: int, total: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        warmup(calls.append, [(1,), (2,)], progress=progress)
    assert calls == [1]


def test_a_long_warm_up_says_in_the_log_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "safecompile")
    warmup(int, [(1,), (2,)])
    assert not caplog.records
    monkeypatch.setattr("safecompile._warmup.LOG_EVERY", 0.0)
    warmup(int, [(1,), (2,)])
    assert [one.getMessage() for one in caplog.records] == [f"warm-up: {n} of 2 calls are made" for n in (1, 2)]


# ---------------------------------------------------------------------------------------------------------- waiting


@pytest.mark.parametrize("when_compiling", ["eager", "error"])
def test_a_warm_up_waits_whatever_else_calls_do_while_another_thread_compiles(when_compiling: Any) -> None:
    other = CountingBackend(gated=True)
    slow = thread_safe_compile(lambda x: x.cos(), backend=other)
    backend = CountingBackend()
    f = thread_safe_compile(sin_exp, backend=backend, when_compiling=when_compiling)

    def warm() -> Any:
        assert other.entered.wait(30)
        return warmup(f, (torch.ones(4),))

    def release() -> None:
        assert other.entered.wait(30)
        wait_until(lambda: fx_trace_lock.statistics().waiters)
        other.release.set()

    _, report, _ = run_threads([lambda: slow(torch.ones(4)), warm, release])
    assert (report.graphs, backend.count) == (1, 1)
    assert report.threads[0].waited_seconds > 0


def test_only_the_thread_that_warms_up_waits_whatever_is_asked_for() -> None:
    guarded = Guarded("f", "model.py", 1, when_compiling="eager")
    seen: list[str] = []

    def fn() -> None:
        warmup(lambda: None, ())
        seen.append(guarded.when_compiling)
        seen.extend(run_threads([lambda: guarded.when_compiling]))

    warmup(fn, ())
    with pytest.raises(ZeroDivisionError):
        warmup(lambda: 1 // 0, ())
    assert [*seen, guarded.when_compiling] == ["wait", "eager", "eager"]


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


def test_the_report_has_the_time_of_forward_and_backward_compiles() -> None:
    f = thread_safe_compile(sin_exp, backend="aot_eager")
    with max_compiles(2) as limit:
        report = warmup(f, (ones(),), backward=True)
    assert [one.kind for one in limit.compiles] == ["forward", "backward"]
    (mine,) = report.threads
    assert mine.compile_seconds == sum(one.seconds for one in limit.compiles) > 0
    assert (mine.thread, mine.graphs, mine.variants) == (threading.current_thread().name, 1, ())


def test_the_report_counts_nothing_that_other_threads_compile_for_others() -> None:
    f, g = (thread_safe_compile(function, backend="aot_eager") for function in (sin_exp, lambda x: x.cos()))

    def step(x: Tensor) -> Tensor:
        run_threads([lambda: g(ones()).sum().backward()])
        return f(x)

    with max_compiles(4) as limit:
        report = warmup(step, (ones(),), backward=True)
    assert len(limit.compiles) == 4
    mine = sum(one.seconds for one in limit.compiles if one.function == "sin_exp")
    assert (report.graphs, report.threads[0].compile_seconds) == (1, mine)


class InAnotherThread(torch.autograd.Function):
    """Run the backward of a function, and of graphs that are there already, in another thread."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, start: Callable[[Any], object], f: Callable[[Tensor], Tensor], graphs: Any
    ) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            ctx.graphs, ctx.start = [(x, f(x)), *graphs], start
        return ctx.graphs[0][1].detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        found: list[Tensor] = []
        done = threading.Event()

        def run() -> None:
            try:
                for x, y in ctx.graphs:
                    found.append(torch.autograd.grad(y.sum(), x)[0])
            finally:
                done.set()

        ctx.start(run)
        assert done.wait(60)
        return found[0], None, None, None


def start_as_autograd_does(work: Any) -> None:
    """Start a thread that Python does not know, as those that autograd has for accelerators."""
    _thread.start_new_thread(work, ())


def start_as_users_do(work: Any) -> None:
    threading.Thread(target=work).start()


@pytest.mark.parametrize(("start", "counted"), [(start_as_autograd_does, 2), (start_as_users_do, 1)])
def test_the_report_has_the_backwards_that_autograd_compiles_in_its_own_threads(start: Any, counted: int) -> None:
    f = thread_safe_compile(sin_exp, backend="aot_eager")
    g = thread_safe_compile(lambda x: x.cos(), backend="aot_eager")

    def of_another_thread() -> tuple[Tensor, Tensor]:
        x = ones()
        return x, g(x)

    graphs = run_threads([of_another_thread])
    with max_compiles(9) as limit:
        report = warmup(lambda x: InAnotherThread.apply(x, start, f, graphs), (ones(),), backward=True)
    kinds = [(one.kind, one.function) for one in limit.compiles]
    assert kinds == [("forward", "sin_exp"), ("backward", "sin_exp"), ("backward", limit.compiles[2].function)]
    mine = sum(one.seconds for one in limit.compiles[:counted])
    assert (report.graphs, report.threads[0].compile_seconds) == (1, mine)


def test_the_report_can_be_read_and_pickled() -> None:
    f = thread_safe_compile(sin_exp, backend="eager")
    report = warmup(f, (ones(),))
    first, second = str(report).splitlines()
    assert first.startswith("warm-up: 1 graph compiled in ")
    assert second.startswith(f"  {threading.current_thread().name}: 1 graph compiled in ")
    assert "nothing compiled" in str(warmup(f, (ones(),)))
    assert pickle.loads(pickle.dumps(report)) == report


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


def mappings(*devices: str) -> dict[Any, Any]:
    return dict.fromkeys(devices, lambda x: None)


@pytest.mark.parametrize(
    ("error", "text", "options"),
    [
        (TypeError, "keyword arguments as a mapping, or as a list", {"kwargs": 3}),
        (TypeError, "keyword arguments as a mapping, or as a list", {"kwargs": [{}, None]}),
        (ValueError, "keyword arguments for 1 sets of inputs, and there are 2", {"kwargs": [{}]}),
        (ValueError, "grad=None, True, False or \"both\", not 'all'", {"grad": "all"}),
        (ValueError, "not 1", {"grad": 1}),
        (ValueError, "leave one of them out", {"grad": False, "backward": True}),
        (TypeError, "devices as a list of one or more, not 'cpu'", {"devices": "cpu"}),
        (TypeError, "devices as a list of one or more, not \\[\\]", {"devices": []}),
        (ValueError, "cannot use the device 'no such'", {"devices": ["cpu", "no such"]}),
        (ValueError, "cannot use the device 'cuda:99'", {"devices": ["cuda:99"]}),
        (ValueError, "a device more than once: cpu, cpu", {"devices": ["cpu", torch.device("cpu:0")]}),
        (ValueError, "for the devices cpu, not for cpu, meta", {"fn": mappings("cpu"), "devices": ["cpu", "meta"]}),
        (ValueError, "for the devices cpu, meta, not for", {"fn": mappings("cpu", "meta"), "devices": ["cpu"]}),
        (ValueError, "for the devices cpu, cpu:0, not for", {"fn": mappings("cpu", "cpu:0"), "devices": ["cpu"]}),
        (ValueError, "cannot use the device 3.5", {"fn": {3.5: print}, "devices": ["cpu"]}),
        (UnsupportedCallableError, "cannot call NoneType", {"fn": {"cpu": None}, "devices": ["cpu"]}),
        (UnsupportedCallableError, "cannot call dict.*devices for a mapping", {"fn": mappings("cpu")}),
        (TypeError, "takes a ThreadPoolExecutor, not list", {"executor": []}),
    ],
)
def test_bad_input_is_refused_before_any_work(error: type[Exception], text: str, options: dict[str, Any]) -> None:
    called: list[Any] = []
    with pytest.raises(error, match=text):
        warmup(options.pop("fn", called.append), [(torch.ones(1),), (torch.ones(2),)], **options)
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
