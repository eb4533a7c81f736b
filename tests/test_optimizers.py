"""Optimizers step eagerly beside the compiles of other threads as they do alone (S6)."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import pytest
import torch

import safecompile
from safecompile import thread_safe_compile
from tests.helpers.backends import AotCountingBackend, CountingBackend
from tests.helpers.subprocess_run import run_forked
from tests.helpers.threads import run_threads, switch_interval
from tests.helpers.torch_version import unheard_of
from tests.helpers.tracing import TRACES, Model, held_trace

pytestmark = pytest.mark.usefixtures("nothing_compiled")

STEPS = 8

OPTIMIZERS: dict[str, Any] = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *itertools.product(
        OPTIMIZERS,
        [
            {},
            {"foreach": True},
            {"foreach": False},
            {"foreach": True, "maximize": True},
        ],
    ),
    *itertools.product(["AdamW", "Adam"], [{"amsgrad": True}, {"amsgrad": True, "foreach": True}]),
    *itertools.product(
        # Adam does not know the option before torch 2.7.
        [
            name
            for name in ("Adam", "NAdam", "RAdam")
            if "decoupled_weight_decay" in signature(OPTIMIZERS[name]).parameters
        ],
        [{"decoupled_weight_decay": True, "weight_decay": 0.1, "foreach": True}],
    ),
]
# Their steps do not ask whether a compile is running.
INDIFFERENT: list[tuple[str, dict[str, Any]]] = [("AdamW", {"fused": True}), ("Adam", {"fused": True})]

each_variant = pytest.mark.parametrize(("name", "options"), VARIANTS + INDIFFERENT, ids=str)
each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def train(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Make some steps with given gradients; return the parameters and all of the optimizer's state."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 4), (4,), (), (2, 1, 5))
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    optimizer = OPTIMIZERS[name](parameters, **{"lr": 0.01, **options})
    for _ in range(STEPS):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return {"parameters": [parameter.detach() for parameter in parameters], **optimizer.state_dict()}


def differences(got: Any, want: Any, path: str = "") -> list[str]:
    """Return where two results of `train` are not bitwise the same."""
    if type(got) is not type(want):
        return [f"{path}: {type(got).__name__} instead of {type(want).__name__}"]
    if isinstance(want, torch.Tensor):
        same = (got.dtype, got.shape) == (want.dtype, want.shape) and torch.equal(got, want)
    elif isinstance(want, dict):
        return [
            text
            for key in want.keys() | got.keys()
            for text in differences(got.get(key), want.get(key), f"{path}/{key}")
        ]
    elif isinstance(want, list):
        return [
            text
            for index, pair in enumerate(zip(got, want, strict=True))
            for text in differences(*pair, f"{path}/{index}")
        ]
    else:
        same = got == want
    return [] if same else [f"{path}: {got} instead of {want}"]


Alone = Callable[[str, dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="module")
def torch_alone() -> Alone:
    """Return what each variant's `train` returns in the only thread of torch without the library."""
    safecompile.uninstall()
    results = {str(variant): train(*variant) for variant in VARIANTS + INDIFFERENT}
    return lambda name, options: results[str((name, options))]


@pytest.fixture
def alone(torch_alone: Alone) -> Alone:
    safecompile.install()
    return torch_alone


def aot(backend: AotCountingBackend) -> Callable[[], object]:
    call = thread_safe_compile(lambda x: x.sin() * 2, backend=backend)
    return lambda: call(torch.ones(2, requires_grad=True)).sum().backward()


@contextlib.contextmanager
def held(gate: CountingBackend, work: Callable[[], object]) -> Iterator[None]:
    """Let another thread do something that compiles, and hold the compile until the end of the block."""
    failures: list[BaseException] = []

    def compiling() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)
        finally:
            gate.entered.set()

    thread = threading.Thread(target=compiling, name="compiling", daemon=True)
    thread.start()
    try:
        assert gate.entered.wait(60)
        assert thread.is_alive(), failures
        yield
        assert thread.is_alive(), failures  # to the end
    finally:
        gate.release.set()
        thread.join(60)
    assert not failures and not thread.is_alive()


@contextlib.contextmanager
def beside(what: str) -> Iterator[None]:
    """Hold a compile, or a trace that counts as one, in another thread."""
    if what == "export":
        with held_trace(TRACES["export"], Model()):
            yield
        return
    if what == "compile":
        gate = CountingBackend(gated=True)
        call = thread_safe_compile(torch.sin, backend=gate)
        with held(gate, lambda: call(torch.ones(2))):
            yield
        return
    aot_backend = AotCountingBackend(gated_forward=what == "forward", gated_backward=what == "backward")
    with held(getattr(aot_backend, what), aot(aot_backend)):
        yield


@each_variant
def test_steps_beside_a_held_compile_are_those_of_the_thread_alone(
    name: str, options: dict[str, Any], alone: Alone
) -> None:
    with beside("compile"):
        assert differences(train(name, options), alone(name, options)) == []


@each_optimizer
@pytest.mark.parametrize("what", ["forward", "backward", "export"])
def test_steps_beside_a_compile_held_at_another_stage_are_those_of_the_thread_alone(
    what: str, name: str, alone: Alone
) -> None:
    with beside(what):
        assert differences(train(name, {}), alone(name, {})) == []


@each_optimizer
def test_capturable_parameters_on_the_cpu_are_refused_beside_a_compile_as_alone(name: str) -> None:
    safecompile.install()
    with beside("compile"), pytest.raises(AssertionError, match="capturable=True"):
        train(name, {"capturable": True})


@each_optimizer
@pytest.mark.parametrize("options", [{}, {"foreach": True}], ids=str)
def test_steps_of_a_trajectory_that_begins_alone_and_goes_on_beside_a_compile(
    name: str, options: dict[str, Any]
) -> None:
    def steps(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, first: int) -> None:
        for step in range(first, first + STEPS):
            parameter.grad = torch.linspace(-1, 1 + step, 6)
            optimizer.step()

    def begin() -> tuple[torch.optim.Optimizer, torch.nn.Parameter]:
        parameter = torch.nn.Parameter(torch.linspace(0, 1, 6))
        optimizer = OPTIMIZERS[name]([parameter], **options)
        steps(optimizer, parameter, 0)
        return optimizer, parameter

    (optimizer, want), (optimizer_beside, got) = begin(), begin()
    steps(optimizer, want, STEPS)
    safecompile.install()
    with beside("compile"):
        steps(optimizer_beside, got, STEPS)
    assert torch.equal(got, want)
    assert differences(optimizer_beside.state_dict(), optimizer.state_dict()) == []


def make(number: int) -> Any:
    """Make a function with code of its own: one code would be one table in Dynamo."""
    namespace: dict[str, Any] = {}
    source = f"def add_{number}(x):\n    return (x + {number}).sin()\n"
    # Torch 2.8 and older wrap a function from no file in one of their own, whose code it shares with all others.
    exec(compile(source, __file__, "exec"), namespace)
    return namespace[f"add_{number}"]


def test_steps_beside_a_stream_of_compiles_are_those_of_the_thread_alone(alone: Alone) -> None:
    """Each variant trains again until another thread has compiled two more functions meanwhile."""
    backend, trained, broken = CountingBackend(), threading.Event(), threading.Event()

    def stream() -> None:
        try:
            for number in itertools.takewhile(lambda _: not trained.is_set(), itertools.count()):
                function = make(number)
                got = thread_safe_compile(function, backend=backend, fullgraph=True)(torch.ones(2))
                assert torch.equal(got, function(torch.ones(2)))
        finally:
            broken.set()

    def train_all() -> None:
        try:
            for name, options in VARIANTS:
                compiles = backend.count
                while backend.count < compiles + 2 and not broken.is_set():
                    assert differences(train(name, options), alone(name, options)) == []
        finally:
            trained.set()

    with switch_interval(1e-6):
        run_threads([stream, train_all])
    assert backend.count >= 2 * len(VARIANTS)


def test_steps_of_all_optimizers_each_in_a_thread_beside_compiles_of_each_other(alone: Alone) -> None:
    """Each thread compiles a function of its own between its trajectories."""
    numbers = itertools.count()

    def work(name: str) -> None:
        for _ in range(4):
            function = make(next(numbers))
            call = thread_safe_compile(function, backend="aot_eager", fullgraph=True)
            assert torch.equal(call(torch.ones(2)), function(torch.ones(2)))
            assert differences(train(name, {}), alone(name, {})) == []

    with switch_interval(1e-6):
        run_threads([lambda name=name: work(name) for name in OPTIMIZERS])  # type: ignore[misc]


CONTROL = """
import itertools, json, threading, torch
from tests.helpers.backends import CountingBackend
from tests.helpers.threads import run_threads, switch_interval
from tests.test_optimizers import INDIFFERENT, OPTIMIZERS, VARIANTS, differences, make, train

want = [(name, options, train(name, options)) for name, options in VARIANTS + INDIFFERENT]
plain = {name: alone for name, options, alone in want if not options}

backend = CountingBackend(gated=True)
compiling = threading.Thread(target=torch.compile(torch.sin, backend=backend), args=(torch.ones(2),))
compiling.start()
assert backend.entered.wait(60)
held = [(name, options) for name, options, alone in want if differences(train(name, options), alone)]
for name in OPTIMIZERS:
    train(name, {"capturable": True})  # alone it is an error: no tensor is on a device that can capture
backend.release.set()
compiling.join()

done, stream_wrong = threading.Event(), set()

def stream():
    for number in itertools.takewhile(lambda _: not done.is_set(), itertools.count()):
        torch.compile(make(number), backend="eager", fullgraph=True)(torch.ones(2))

def train_all():
    try:
        for _ in range(1000):
            for name in plain.keys() - stream_wrong:
                if differences(train(name, {}), plain[name]):
                    stream_wrong.add(name)
            if len(stream_wrong) == len(plain):
                break
    finally:
        done.set()

with switch_interval(1e-6):
    run_threads([stream, train_all])
print(json.dumps({"held": held, "stream": sorted(stream_wrong)}))
"""


@unheard_of((2, 13), "is_compiling() in optimizers beside a compile")
def test_control_steps_beside_compiles_are_others_with_torch_alone() -> None:
    wrong = json.loads(run_forked(CONTROL, timeout=100).check().stdout)
    assert wrong == {"held": [list(variant) for variant in VARIANTS], "stream": sorted(OPTIMIZERS)}
