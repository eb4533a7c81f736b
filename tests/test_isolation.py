"""Traces, compiles and eager code of different threads see nothing of each other."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import math
import threading
import time
from math import sqrt
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.fx
from torch._dynamo.guards import GuardManagerWrapper
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

import safecompile
from safecompile import fx_trace_lock, thread_safe_compile
from tests.helpers.backends import AotCountingBackend, CountingBackend
from tests.helpers.subprocess_run import run_forked
from tests.helpers.threads import run_threads, switch_interval
from tests.helpers.torch_version import ASKS_IN_A_COMPILE, TORCH, limit, repaired
from tests.helpers.tracing import (
    TRACES,
    Block,
    BlockTracer,
    Held,
    Model,
    example,
    held_trace,
    is_exporting,
    is_symbolic_tracing,
    rows,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.fx import Graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "short_insertion_limit")


@pytest.fixture
def short_insertion_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait long for entries that an earlier test's reset() has removed, see the test of it below."""
    monkeypatch.setattr("safecompile._core.gate.INSERTION_LIMIT", 1.0)


@torch.fx.wrap
def leaf(x: torch.Tensor, y: float) -> torch.Tensor:
    return x + y


torch.fx.wrap("len")


def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


class Wrapped(Block):
    """Calls what a trace replaces in this module's globals."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return halved(leaf(super().forward(x), sqrt(9.0))) * len((1, 2))


_serial = itertools.count()


def each_trace(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("trace", [pytest.param(TRACES[name], id=name) for name in names or TRACES])


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Check that what a trace replaces is what it was."""

    def state() -> dict[str, Any]:
        return {
            "__call__": torch.nn.Module.__call__,
            "__call__'s code": torch.nn.Module.__call__.__code__,
            "__getattr__": torch.nn.Module.__getattr__,
            "__getattr__'s code": torch.nn.Module.__getattr__.__code__,
            "math": (type(math), dict(vars(math))),
            "globals": {name: globals().get(name) for name in ("leaf", "sqrt", "len", "halved")},
            "flags": flags(),
        }

    before = state()
    yield
    assert state() == before


def flags() -> tuple[bool, ...]:
    return (
        torch.compiler.is_compiling(),
        is_exporting(),
        is_symbolic_tracing(),
    )


def reference(trace: Callable[[torch.nn.Module], Graph], make: Callable[[], torch.nn.Module] = Model) -> list[Any]:
    """Return the nodes that a single thread gets from torch as it is."""
    assert not safecompile.statistics().installed
    return rows(trace(make()))


def compiled(model: torch.nn.Module, backend: Any, **options: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    # A function and not the module itself: the trace goes through the very object that is called here.
    def call(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    # The limit of recompiles is one for each code object.
    call.__code__ = call.__code__.replace(co_name=f"call_{next(_serial)}")
    return thread_safe_compile(call, backend=backend, fullgraph=True, **options)


# --- beside a trace that has stopped in the middle


@each_trace()
def test_eager_calls_beside_a_trace_of_the_same_model_return_tensors(trace: Callable[..., Graph]) -> None:
    wanted, model = reference(trace), Model()
    want = model(example())
    safecompile.install()
    with nothing_left_behind(), held_trace(trace, model) as held:
        for called in (model, model.first, model.rest):
            assert type(called(example())) is torch.Tensor
        assert torch.equal(model(example()), want)
        assert model.bias is model._parameters["bias"]
        assert math.sqrt(4.0) == 2.0
        assert rows(held.finish()) == wanted


@each_trace()
def test_compiled_calls_beside_a_trace_of_the_same_model_are_right_and_compile_no_more_than_alone(
    trace: Callable[..., Graph],
) -> None:
    wanted, model = reference(trace), Model()
    want = {n: model(example(n)) for n in (2, 3, 5)}
    warm, cold = CountingBackend(), CountingBackend()
    call_warm = compiled(model, warm, dynamic=False)
    call_cold = compiled(model, cold, dynamic=False)
    call_warm(example(2))
    with nothing_left_behind(), held_trace(trace, model) as held:
        assert torch.equal(call_warm(example(2)), want[2])
        assert warm.count == 1
        assert torch.equal(call_warm(example(3)), want[3])
        assert warm.count == 2
        assert torch.equal(call_cold(example(2)), want[2])
        assert torch.equal(call_cold(example(5)), want[5])
        assert cold.count == 2
        assert rows(held.finish()) == wanted
    for n, value in want.items():  # what was compiled beside the trace holds without it
        assert torch.equal(call_warm(example(n)), value)
        assert torch.equal(call_cold(example(n)), value)
    assert (warm.count, cold.count) == (3, 3)


@each_trace("symbolic_trace", "make_fx", "export")
def test_a_backward_is_compiled_beside_a_trace(trace: Callable[..., Graph]) -> None:
    wanted, model = reference(trace), Model()
    x = example().requires_grad_()
    (want,) = torch.autograd.grad(model(x).sum(), x)
    backend = AotCountingBackend()
    call = compiled(model, backend)
    safecompile.install()
    with held_trace(trace, model) as held:
        (got,) = torch.autograd.grad(call(x).sum(), x)
        assert torch.equal(got, want)
        assert (backend.forward.count, backend.backward.count) == (1, 1)
        assert rows(held.finish()) == wanted


@each_trace("symbolic_trace", "make_fx", "export")
def test_plain_compiled_modules_beside_a_trace_are_right_once_installed(trace: Callable[..., Graph]) -> None:
    model, backend = Model(), CountingBackend()
    want = model(example())
    call = torch.compile(model, backend=backend, fullgraph=True)
    safecompile.install()
    with held_trace(trace, model):
        assert torch.equal(call(example()), want)
        assert torch.equal(call(example()), want)
    assert torch.equal(call(example()), want)
    assert backend.count == 1


@each_trace()
def test_the_flags_of_a_tracing_thread_are_its_own(trace: Callable[..., Graph]) -> None:
    safecompile.install()
    with held_trace(trace, Model()):
        assert flags() == (False, False, False)
        assert not torch.fx._symbolic_trace.is_fx_tracing()


CONTROL = """
import json
import torch
from tests.helpers.backends import CountingBackend
from tests.helpers.tracing import TRACES, Model, example, held_trace, is_exporting, rows

report = {}
for name, trace in TRACES.items():
    torch._dynamo.reset()
    alone, model = rows(trace(Model())), Model()
    want = model(example())
    call = torch.compile(lambda x: model(x), backend=CountingBackend(), fullgraph=True)
    call(example())
    faults = report[name] = []

    def attempt(what, function):
        try:
            got = function()
            if type(got) is not torch.Tensor or not torch.equal(got, want):
                faults.append(what)
        except Exception:
            faults.append(what)

    with held_trace(trace, model) as held:
        attempt("eager", lambda: model(example()))
        attempt("compiled", lambda: call(example()))
        if torch.compiler.is_compiling() or is_exporting():
            faults.append("flags")
    if isinstance(held.outcome, BaseException) or rows(held.outcome) != alone:
        faults.append("graph")
print(json.dumps(report))
"""


def test_control_torch_alone_disturbs_and_is_disturbed_by_other_threads() -> None:
    report = json.loads(run_forked(CONTROL).check().stdout)
    refused = ["compiled"] if TORCH < (2, 14) else []  # the flag is each thread's own from then on
    for name in TRACES:
        if name == "export":
            assert report[name] == ["eager", "compiled", "flags"]
        elif name.startswith("make_fx"):
            assert report[name] == refused
        else:
            assert report[name] == ["eager", *refused, "graph"]


# --- functions in a module's globals, math, nested traces, other tracers


def wrapped_tracer(model: torch.nn.Module) -> Graph:
    class Tracer(BlockTracer):
        def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, torch.nn.Linear)

    return Tracer(autowrap_functions=(halved,)).trace(model)


def test_wrapped_functions_are_nodes_and_work_for_other_threads_meanwhile() -> None:
    wanted, model = reference(wrapped_tracer, Wrapped), Wrapped()
    assert {leaf, halved} <= {row.target for row in wanted}
    want = model(example())
    safecompile.install()
    with nothing_left_behind(), held_trace(wrapped_tracer, model) as first:
        assert torch.equal(model(example()), want)
        assert (sqrt(16.0), len("abc")) == (4.0, 3)
        with held_trace(wrapped_tracer, model) as second:  # overlapping, and neither nested in the other
            assert rows(first.finish()) == wanted
            assert torch.equal(model(example()), want)
            assert rows(wrapped_tracer(model)) == wanted
            assert rows(second.finish()) == wanted


@pytest.mark.xfail(
    strict=True,
    reason="a name in a module's globals is replaced for all threads, and Dynamo guards on it: one more compile",
)
def test_wrapped_functions_cost_other_threads_no_compile() -> None:
    model, backend = Wrapped(), CountingBackend()
    want = model(example())
    call = compiled(model, backend)
    call(example())
    with held_trace(wrapped_tracer, model):
        assert torch.equal(call(example()), want)
    assert torch.equal(call(example()), want)
    assert backend.count == 1


@limit((2, 7), "compiles through what a trace has put around functions of a module")
def test_wrapped_functions_are_compiled_right_beside_a_trace() -> None:
    model, backend = Wrapped(), CountingBackend()
    want = model(example())
    call = compiled(model, backend)
    safecompile.install()
    with held_trace(wrapped_tracer, model):
        assert torch.equal(call(example()), want)
    assert torch.equal(call(example()), want)


def uses_math(x: torch.Tensor, size: int) -> Any:
    return x * math.sqrt(size) + sqrt(size) + math.floor(math.pi)


def trace_math(_: torch.nn.Module) -> Graph:
    return torch.fx.Tracer().trace(uses_math)


def test_functions_of_math_are_nodes_in_the_trace_and_themselves_elsewhere() -> None:
    wanted = reference(trace_math)
    assert [row.target for row in wanted].count(math.sqrt) == 2
    original, backend = math.sqrt, CountingBackend()
    call = thread_safe_compile(uses_math, backend=backend, fullgraph=True, dynamic=False)
    want = uses_math(example(), 4)
    safecompile.install()
    with nothing_left_behind(), held_trace(TRACES["symbolic_trace"], Model()) as held:
        assert math.sqrt is original
        assert rows(trace_math(Model())) == wanted
        assert torch.equal(call(example(), 4), want)
        assert math.sqrt is original
        held.finish()
    assert torch.equal(call(example(), 4), want)


class Nesting(BlockTracer):
    """Traces each block with a tracer of its own, in the middle of its own trace."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: list[Any] = []

    def call_module(self, m: torch.nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(m, Block):
            self.inner += rows(BlockTracer().trace(m))
        return super().call_module(m, forward, args, kwargs)


def test_nested_traces_give_the_graphs_that_a_single_thread_gets() -> None:
    def nested(model: torch.nn.Module) -> tuple[list[Any], list[Any]]:
        tracer = Nesting()
        return rows(tracer.trace(model)), tracer.inner

    wanted = nested(Model())
    assert wanted[1]
    safecompile.install()
    with nothing_left_behind(), held_trace(TRACES["symbolic_trace"], Model()):
        assert nested(Model()) == wanted


class Scale:
    def by(self, factor: int) -> int:
        return factor * 2


def traced_with_wrapped_method() -> list[Any]:
    table = torch.fx._symbolic_trace._wrapped_methods_to_patch
    scale = Scale()
    table.append((Scale, "by"))
    try:
        return rows(torch.fx.symbolic_trace(lambda x: x * scale.by(3)).graph)
    finally:
        table.remove((Scale, "by"))


def test_a_wrapped_method_called_without_proxies_runs_as_it_is() -> None:
    wanted = traced_with_wrapped_method()
    safecompile.install()
    assert traced_with_wrapped_method() == wanted


_module_call = torch.nn.Module.__call__


class CallsByAReferenceOfItsOwn(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _module_call(self.linear, x)


@pytest.mark.xfail(strict=True, reason="a reference to Module.__call__ that was taken earlier reaches the tracer")
def test_a_module_called_by_a_reference_taken_before_the_trace_is_traced_through() -> None:
    trace = TRACES["symbolic_trace"]
    wanted = reference(trace, CallsByAReferenceOfItsOwn)
    safecompile.install()
    assert rows(trace(CallsByAReferenceOfItsOwn())) == wanted


def test_a_graph_module_made_beside_a_compile_is_of_the_class_it_is_alone() -> None:
    alone = type(torch.fx.symbolic_trace(Model())).__mro__[1]
    backend = CountingBackend(gated=True)
    call = compiled(Model(), backend)

    def beside() -> type:
        assert backend.entered.wait(60)
        try:
            return type(torch.fx.symbolic_trace(Model())).__mro__[1]
        finally:
            backend.release.set()

    assert run_threads([lambda: call(example()), beside])[1] is alone


# --- overlapping traces (P1)


@pytest.mark.parametrize("order", ["first in, first out", "first in, last out"])
@each_trace("symbolic_trace", "Tracer subclass", "make_fx")
def test_overlapping_traces_leave_nothing_behind(trace: Callable[..., Graph], order: str) -> None:
    wanted, model = reference(trace), Model()
    want = model(example())
    safecompile.install()
    with nothing_left_behind(), held_trace(trace, model) as a, held_trace(TRACES["symbolic_trace"], model) as b:
        traces: list[Held] = [a, b] if order == "first in, first out" else [b, a]
        for held in traces:
            held.finish()
            assert torch.equal(model(example()), want)
        assert rows(a.graph) == wanted
    assert torch.equal(model(example()), want)


def test_control_torch_alone_stays_broken_after_overlapping_traces() -> None:
    run_forked("""
        import torch
        from tests.helpers.tracing import TRACES, Model, example, held_trace

        trace, original = TRACES["symbolic_trace"], torch.nn.Module.__call__
        with held_trace(trace, Model()) as first:
            with held_trace(trace, Model()) as second:
                first.stop.go_on.set()
                first.thread.join()
                second.stop.go_on.set()
                second.thread.join()
        assert torch.nn.Module.__call__ is not original
        try:
            Model()(example())
        except NameError:
            pass
        else:
            raise AssertionError("modules work")
    """).check()


EXPORTS = """
import builtins, math
import torch
import safecompile
from tests.helpers.tracing import TRACES, Model, held_trace, rows

names = {"max": builtins.max, "min": builtins.min, "pow": math.pow}

def check():
    now = {"max": builtins.max, "min": builtins.min, "pow": math.pow}
    assert now == names, [name for name in now if now[name] is not names[name]]

export, trace = TRACES["export"], TRACES["symbolic_trace"]
wanted = rows(export(Model()))
safecompile.install()
"""


@pytest.mark.xfail(
    TORCH >= (2, 7), strict=True, reason="an export replaces builtins.max, builtins.min and math.pow for all threads"
)
def test_builtins_are_the_originals_beside_an_export() -> None:
    run_forked(f"""{EXPORTS}
with held_trace(export, Model()):
    check()
""").check()


def test_overlapping_exports_leave_nothing_behind() -> None:
    run_forked(f"""{EXPORTS}
with held_trace(export, Model()) as first, held_trace(export, Model()) as second:
    assert rows(first.finish()) == wanted
    assert rows(second.finish()) == wanted
check()
""").check()


def test_an_export_that_overlaps_a_symbolic_trace_gives_the_graph_it_gives_alone() -> None:
    run_forked(f"""{EXPORTS}
with held_trace(trace, Model()) as first:
    assert rows(export(Model())) == wanted
check()
""").check()


# --- compiling flags


@ASKS_IN_A_COMPILE
def test_is_compiling_is_true_in_the_compiling_thread_only() -> None:
    seen: dict[str, bool] = {}
    gate = CountingBackend(gated=True)

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen["backend"] = torch.compiler.is_compiling()
        return gate(graph, inputs)

    call = compiled(Model(), backend)

    def eager() -> tuple[bool, ...]:
        assert gate.entered.wait(60)
        try:
            return flags()
        finally:
            gate.release.set()

    assert run_threads([lambda: call(example()), eager])[1] == (False, False, False)
    assert seen == {"backend": True}
    assert flags() == (False, False, False)


@ASKS_IN_A_COMPILE
def test_control_is_compiling_is_true_in_all_threads_of_torch_alone() -> None:
    run_forked("""
        import threading, torch
        from tests.helpers.backends import CountingBackend

        backend = CountingBackend(gated=True)
        compiling = threading.Thread(target=torch.compile(torch.sin, backend=backend), args=(torch.ones(2),))
        compiling.start()
        assert backend.entered.wait(60)
        assert torch.compiler.is_compiling()
        backend.release.set()
        compiling.join()
    """).check()


@ASKS_IN_A_COMPILE
def test_is_compiling_is_true_in_the_code_of_a_wrapper_subclass_inside_a_compile_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, list[bool]] = {"worker-0": [], "worker-1": []}
    dispatch = vars(TwoTensor)["__torch_dispatch__"].__func__

    def noting(cls: type, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if not backend.forward.release.is_set():  # later the compiled graph runs, eagerly
            seen[threading.current_thread().name].append(torch.compiler.is_compiling())
        return dispatch(cls, function, types, args, kwargs)

    monkeypatch.setattr(TwoTensor, "__torch_dispatch__", classmethod(noting))
    backend = AotCountingBackend(gated_forward=True)
    call = thread_safe_compile(lambda x: torch.relu(x) + 1, backend=backend, fullgraph=True)

    def compiling() -> torch.Tensor:
        try:
            return call(TwoTensor(example(), example()))
        finally:
            backend.forward.entered.set()

    def eager() -> torch.Tensor:
        assert backend.forward.entered.wait(60)
        try:
            return torch.relu(TwoTensor(example(), example()))
        finally:
            backend.forward.release.set()

    run_threads([compiling, eager])
    assert {name: set(flags) for name, flags in seen.items()} == {"worker-0": {True}, "worker-1": {False}}


def test_a_compile_after_reset_does_not_wait_for_entries_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("safecompile._core.gate.INSERTION_LIMIT", 0.2)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=waits.append)
    monkeypatch.setattr("safecompile._core.gate.time", clock)
    safecompile.install()
    plain = torch.compile(torch.nn.Linear(4, 4), backend="eager")
    run_threads([lambda: plain(example())])
    torch._dynamo.reset()
    compiled(torch.nn.Linear(4, 4), CountingBackend())(example())
    assert waits == []


@ASKS_IN_A_COMPILE
def test_is_compiling_is_true_in_a_helper_thread_of_the_compile() -> None:
    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        assert run_threads(lambda _: torch.compiler.is_compiling(), 2) == [True, True]
        return graph.forward

    compiled(Model(), backend)(example())


def test_a_backend_that_traces_in_helper_threads_finishes() -> None:
    wanted = reference(TRACES["symbolic_trace"])
    found: list[list[Any]] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.extend(run_threads(lambda _: rows(TRACES["symbolic_trace"](Model())), 2))
        return graph.forward

    compiled(Model(), backend)(example())
    assert found == [wanted, wanted]


# --- a user's lock


def locked_model(lock: Any) -> tuple[torch.nn.Module, threading.Event]:
    class Locked(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wants_it.set()
            with lock:
                return super().forward(x)

    wants_it = threading.Event()
    return Locked(), wants_it


LOCK_TRACES = {
    "symbolic_trace": torch.fx.symbolic_trace,
    "make_fx": lambda model: make_fx(model)(example()),
}


def user_lock_schedule(trace: Callable[[torch.nn.Module], Any], around: Any = None) -> tuple[Any, torch.Tensor]:
    """One thread holds a lock of the user's and calls a cold function; another traces code that takes the lock."""
    lock = threading.Lock()
    (model, wants_it), held = locked_model(lock), threading.Event()
    call = compiled(Model(), CountingBackend())

    def caller() -> torch.Tensor:
        with lock:
            held.set()
            assert wants_it.wait(60)  # the trace is at the lock
            return call(example())

    def tracer() -> Any:
        assert held.wait(60)
        with around or contextlib.nullcontext():
            return trace(model)

    graph, result = run_threads([tracer, caller], timeout=40)
    return graph, result


@pytest.mark.parametrize("name", LOCK_TRACES)
def test_a_users_lock_and_a_trace_that_takes_it_do_not_deadlock(name: str) -> None:
    safecompile.install()
    user_lock_schedule(LOCK_TRACES[name])


_global_lock = threading.Lock()


class TakesGlobalLock(Model):
    wants_it = threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.wants_it.set()
        with _global_lock:
            return super().forward(x)


@pytest.mark.xfail(
    strict=True, reason="the cold call gives up waiting for the trace that waits for it, and fails in it"
)
def test_a_users_lock_and_a_trace_that_began_before_the_installation_do_not_disturb_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("safecompile._patches.STRAGGLERS_LIMIT", 0.1)
    user_lock_schedule(LOCK_TRACES["symbolic_trace"])


def test_a_users_lock_and_an_export_that_takes_it_do_not_deadlock() -> None:
    safecompile.install()
    TakesGlobalLock.wants_it.clear()
    model, held = TakesGlobalLock(), threading.Event()
    call = compiled(Model(), CountingBackend())

    def caller() -> torch.Tensor:
        with _global_lock:
            held.set()
            assert TakesGlobalLock.wants_it.wait(60)
            return call(example())

    def tracer() -> Any:
        assert held.wait(60)
        return torch.export.export(model, (example(),), strict=False)

    run_threads([tracer, caller], timeout=40)


def test_control_a_trace_under_the_compile_lock_deadlocks_with_a_users_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    safecompile.install()
    monkeypatch.setattr(fx_trace_lock, "limit", 0.5)
    with pytest.raises(AssertionError, match=r"LockTimeoutError|WaitCycleError|runs eagerly, this once"):
        user_lock_schedule(LOCK_TRACES["symbolic_trace"], around=fx_trace_lock)


# --- a trace that began before the patches were installed


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@each_trace("symbolic_trace", "Tracer subclass", "make_fx")
def test_a_first_guarded_call_in_the_middle_of_a_trace_is_right_and_so_is_the_trace(
    trace: Callable[..., Graph],
) -> None:
    wanted, model = reference(trace), Model()
    want = model(example())
    call, got = compiled(model, CountingBackend()), []
    with nothing_left_behind(), held_trace(trace, model) as held:
        first = threading.Thread(target=lambda: got.append(call(example())), daemon=True)
        first.start()
        while not {p.name: p.installed for p in safecompile.statistics().patches}["compiled-autograd"]:  # the last one
            first.join(0.001)  # until the call is in the middle of the installation, and waits for the trace
        assert rows(held.finish()) == wanted
        first.join(60)
        assert not first.is_alive()
        assert len(got) == 1 and torch.equal(got[0], want)
        assert torch.equal(model(example()), want)
    with nothing_left_behind():
        safecompile.uninstall()
    assert torch.equal(model(example()), want)
    assert rows(trace(Model())) == wanted


BEFORE_INSTALLATION = """
import torch
import safecompile
import safecompile._patches
from tests.helpers.tracing import TRACES, Model, example, held_trace, rows

safecompile._patches.STRAGGLERS_LIMIT = 0.1
"""


@pytest.mark.xfail(
    strict=True, reason="past the wait for it, an older trace's patches are met by everybody, in silence"
)
def test_a_trace_that_outlasts_the_installations_wait_for_it_disturbs_nobody() -> None:
    run_forked(f"""{BEFORE_INSTALLATION}
model = Model()
want = model(example())
call = safecompile.thread_safe_compile(lambda x: model(x), backend="eager", fullgraph=True)
with held_trace(TRACES["symbolic_trace"], model):
    assert torch.equal(call(example()), want)
    assert torch.equal(model(example()), want)
""").check()


@pytest.mark.xfail(strict=True, reason="an export that began before has its state in the module's globals, and fails")
def test_an_installation_in_the_middle_of_an_export_leaves_the_export_right() -> None:
    run_forked(f"""{BEFORE_INSTALLATION}
wanted = rows(TRACES["export"](Model()))
with held_trace(TRACES["export"], Model()) as held:
    safecompile.install()
    assert rows(held.finish()) == wanted
""").check()


# --- loops, for the schedules that nobody thought of


def loops(trace: Callable[[], Any], wanted: Any, model: torch.nn.Module, *, tracers: int = 2, calls: int = 80) -> None:
    """Trace while others call `model` eagerly, warm, cold, and with new shapes."""
    want = {n: model(example(n)) for n in range(1, 5)}
    warm, shapes, colds = CountingBackend(), CountingBackend(), [CountingBackend() for _ in range(2)]
    call_warm, call_shapes = compiled(model, warm), compiled(model, shapes, dynamic=False)
    call_warm(example(2))
    done = threading.Event()

    def tracer() -> int:
        n = 0
        while n == 0 or not done.is_set():
            assert trace() == wanted
            n += 1
        return n

    def until_done(work: Callable[[], None]) -> Callable[[], int]:
        def run() -> int:
            try:
                work()
                return 0
            finally:
                done.set()

        return run

    def eager() -> int:
        while not done.is_set():
            for n, wanted_value in want.items():
                got = model(example(n))
                assert type(got) is torch.Tensor and torch.equal(got, wanted_value)
            assert flags() == (False, False, False)
            assert math.sqrt(4.0) == 2.0
        return 0

    def caller() -> None:
        for k in range(calls):
            assert torch.equal(call_warm(example(2)), want[2])
            if k % 20 == 0:
                n = 1 + k // 20 % 4
                assert torch.equal(call_shapes(example(n)), want[n])
            if k % 40 == 0:
                assert torch.equal(compiled(model, colds[k // 40])(example(2)), want[2])

    with nothing_left_behind(), switch_interval(1e-6):
        run_threads([*[tracer] * tracers, eager, until_done(caller)])
    assert (warm.count, shapes.count, [cold.count for cold in colds]) == (1, 4, [1, 1])


@each_trace("Tracer with autowrap_functions", "make_fx pre_dispatch", "make_fx symbolic")
def test_loops_of_traces_beside_loops_of_calls_of_the_same_model(trace: Callable[..., Graph]) -> None:
    wanted, model = reference(trace), Model()
    safecompile.install()
    # Two make_fx traces at a time take each other's names, see the next test.
    loops(lambda: rows(trace(model)), wanted, model, tracers=1 if "_param_constant0" in str(wanted) else 2)


def test_guards_on_a_module_that_a_trace_has_changed_are_finished_after_the_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    safecompile.install()
    inside, leave = threading.Event(), threading.Event()

    class Waits(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            assert leave.wait(60)
            return x * 2

    trace = threading.Thread(target=torch.fx.Tracer(autowrap_functions=(math.sqrt,)).trace, args=(Waits(),))
    finish = GuardManagerWrapper.finalize

    def finish_after_the_trace(guards: Any) -> None:
        leave.set()
        trace.join()
        gc.collect()
        finish(guards)

    trace.start()
    assert inside.wait(60)
    monkeypatch.setattr(GuardManagerWrapper, "finalize", finish_after_the_trace)
    assert torch.equal(torch.compile(lambda x: x * math.sqrt(4.0), backend="eager")(example()), example() * 2)


@each_trace("make_fx", "make_fx pre_dispatch")
def test_overlapping_make_fx_traces_name_parameters_as_alone(trace: Callable[..., Graph]) -> None:
    wanted = reference(trace)
    safecompile.install()
    with held_trace(trace, Model()) as held:
        assert rows(trace(Model())) == wanted
        assert rows(held.finish()) == wanted


DECOMPOSITIONS = """
import sys, torch, safecompile
from torch.fx.experimental.proxy_tensor import make_fx
from tests.helpers.tracing import example, held_trace, pause

def twice(x):
    y = x.relu()
    pause()
    return y.relu()

def trace(table):
    return lambda _: make_fx(twice, decomposition_table=table)(example()).graph

def clamped(x):
    clamps.append(x)
    return x.clamp(min=0)

if sys.argv[1] == "library":
    safecompile.install()
clamps, table = [], {torch.ops.aten.relu.default: clamped}
with held_trace(trace(table), None) as first, held_trace(trace(None), None) as second:
    first.stop.go_on.set()
    first.thread.join()
    if len(clamps) != 2:
        sys.exit(f"decomposed {len(clamps)} of 2")
    graphs = first.finish(), second.finish()
operators = [[str(node.target) for node in graph.nodes if node.op == "call_function"] for graph in graphs]
assert operators == [["aten.clamp.default"] * 2, ["aten.relu.default"] * 2], operators
"""


def test_traces_that_overlap_use_their_own_decompositions() -> None:
    run_forked(DECOMPOSITIONS, ["library"]).check()


@repaired((2, 13), "one table of decompositions for all threads")
def test_control_with_torch_alone_a_trace_uses_the_decompositions_of_another() -> None:
    assert "decomposed 1 of 2" in run_forked(DECOMPOSITIONS, ["alone"]).stderr


@pytest.mark.parametrize("same", [False, True], ids=["of another model", "of the same model"])
def test_loops_of_exports_beside_loops_of_calls(same: bool) -> None:
    trace = TRACES["export"]
    wanted, model = reference(trace), Model()
    other = model if same else Model()
    safecompile.install()
    loops(lambda: rows(trace(other)), wanted, model, tracers=1)


STRICT_EXPORT = """
import sys, threading
import torch
import safecompile
from tests.helpers.backends import CountingBackend
from tests.helpers.tracing import example, rows
from tests.helpers.threads import run_threads, switch_interval

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
    def forward(self, x):
        return self.linear(x).relu()

def export(model):
    if what == "model":
        return rows(torch.export.export(model, (example(),), strict=True).graph)
    return rows(torch._dynamo.export(model.forward)(example()).graph_module.graph)

how, what = sys.argv[1:]
wanted, model, other, done = export(Model()), Model(), Model(), threading.Event()
want, backend = model(example()), CountingBackend()
if how == "library":
    safecompile.install()
call = torch.compile(model, backend=backend, fullgraph=True)
call(example())
if how == "alone":
    export(other)
    call(example())
    sys.exit(f"compiled {backend.count} times")

def calls():
    while not done.is_set():
        assert torch.equal(call(example()), want)

def exports():
    try:
        for _ in range(6):
            assert export(other) == wanted
    finally:
        done.set()

with switch_interval(1e-6):
    run_threads([calls, calls, exports])
assert backend.count == 1, backend.count
"""


@pytest.mark.parametrize("what", ["model", "method"])
def test_a_strict_export_of_the_same_code_costs_compiled_calls_nothing(what: str) -> None:
    run_forked(STRICT_EXPORT, ["library", what]).check()


@pytest.mark.parametrize("what", ["model", "method"])
def test_control_with_torch_alone_a_strict_export_frees_what_is_compiled(what: str) -> None:
    assert "compiled 2 times" in run_forked(STRICT_EXPORT, ["alone", what]).stderr


CALLS_BESIDE_A_TRACE_AT_ITS_ENDS = """
import sys
import torch
import safecompile
from tests.helpers.backends import CountingBackend
from tests.helpers.regions import elsewhere
from tests.helpers.tracing import Model, example

how = sys.argv[1]
model, other, backend, results = Model(), Model(), CountingBackend(), []
want = model(example())
if how == "library":
    safecompile.install()
call = torch.compile(model, backend=backend, fullgraph=True)
call(example())
places = {"patch_method", "revert", "_install_method", "leave"}  # torch's, and the library's

def attempt():
    try:
        return torch.equal(call(example()), want)
    except Exception as error:
        return repr(error)

def at_each_line(frame, event, _):
    if frame.f_code.co_name not in places:
        return None
    if event == "line":
        results.append(elsewhere(attempt))
    return at_each_line

sys.settrace(at_each_line)
torch.fx.symbolic_trace(other)
sys.settrace(None)
assert len(results) > 10, results
if set(results) != {True} or backend.count > 1:
    sys.exit(f"wrong: {backend.count} compiles, {results}")
"""


def test_calls_at_any_moment_at_which_a_trace_puts_or_takes_its_patches_are_right() -> None:
    run_forked(CALLS_BESIDE_A_TRACE_AT_ITS_ENDS, ["library"]).check()


def test_control_with_torch_alone_such_calls_fail() -> None:
    assert "wrong: " in run_forked(CALLS_BESIDE_A_TRACE_AT_ITS_ENDS, ["alone"]).stderr
