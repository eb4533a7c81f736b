"""Compiles of code that does not know the library: `torch.compile` and `Module.compile`, once the patches are installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import safecompile
from tests.helpers.backends import CountingBackend
from tests.helpers.subprocess_run import run_forked
from tests.helpers.threads import run_threads, switch_interval
from tests.helpers.torch_version import limit

pytestmark = pytest.mark.usefixtures("nothing_compiled")

THREADS = 16


@pytest.fixture(autouse=True)
def installed(nothing_compiled: None) -> None:
    safecompile.install()


def make_module() -> nn.Module:
    """Make a module whose class has code of its own: torch limits how many variants one code has."""
    namespace: dict[str, Any] = {}
    exec("def forward(self, x):\n    return (x * self.weight).relu()\n", namespace)
    module: nn.Module = type("Scale", (nn.Module,), namespace)()
    module.weight = nn.Parameter(torch.arange(1.0, 5.0))
    return module


def compiled_in_place(module: nn.Module, **options: Any) -> Any:
    module.compile(**options)
    return module


def compiled_object(module: nn.Module, **options: Any) -> Any:
    return torch.compile(module, **options)


WAYS: dict[str, Callable[..., Any]] = {"Module.compile": compiled_in_place, "torch.compile": compiled_object}


def five_times(_: nn.Module, grads: Any, __: Any) -> Any:
    return (grads[0] * 5,)


# What a hook does shows in the result how often it has run.
HOOKS: dict[str, Callable[[nn.Module], object]] = {
    "none": lambda module: None,
    "pre": lambda module: module.register_forward_pre_hook(lambda _, args: (args[0] + 1,)),
    "post": lambda module: module.register_forward_hook(lambda _, args, output: output * 3),
    "backward": lambda module: module.register_full_backward_hook(five_times),
}


def herd(call: Callable[[torch.Tensor], torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Let all threads make the same first call, and return each one's result and gradient."""

    def work(_: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.linspace(-1.0, 1.0, 8).reshape(2, 4).requires_grad_()
        y = call(x)
        (grad,) = torch.autograd.grad(y.sum(), x)
        return y.detach(), grad

    return run_threads(work, THREADS)


# Between the call and the compiled frame a hook has run: the call cannot be made again.
ONCE_AFTER_A_HOOK = limit((2, 7), "one compile for threads that call a module with such hooks together")


@pytest.mark.parametrize("fullgraph", [False, True], ids=["", "fullgraph"])
@pytest.mark.parametrize(
    "hooks",
    [pytest.param(hooks, marks=ONCE_AFTER_A_HOOK if hooks in ("pre", "backward") else ()) for hooks in HOOKS],
)
@pytest.mark.parametrize("way", WAYS)
def test_a_herd_compiles_each_graph_of_a_module_once_and_its_hooks_run_once_a_call(
    way: str, hooks: str, fullgraph: bool
) -> None:
    eager, module, backend = make_module(), make_module(), CountingBackend()
    for one in (eager, module):
        HOOKS[hooks](one)
    ((want, gradient), *_) = herd(eager)
    call = WAYS[way](module, backend=backend, fullgraph=fullgraph)
    with switch_interval(1e-6):
        outcomes = herd(call)
    assert all(torch.equal(y, want) and torch.equal(grad, gradient) for y, grad in outcomes)
    assert backend.count == (2 if hooks in ("pre", "post") else 1)  # a forward hook is a graph of its own


@pytest.mark.parametrize("fullgraph", [False, True], ids=["", "fullgraph"])
def test_a_herd_compiles_a_function_once(fullgraph: bool) -> None:
    backend = CountingBackend()
    f = torch.compile(lambda x: (x * x).sin(), backend=backend, fullgraph=fullgraph)
    with switch_interval(1e-6):
        outcomes = herd(f)
    x = torch.linspace(-1.0, 1.0, 8).reshape(2, 4)
    assert all(torch.equal(y, (x * x).sin()) for y, _ in outcomes)
    assert backend.count == 1


def test_objects_that_were_compiled_before_the_installation_are_compiled_once_too() -> None:
    safecompile.uninstall()
    calls, backends = [], [CountingBackend() for _ in range(3)]
    calls.append(torch.compile(lambda x: x.cos(), backend=backends[0]))
    calls.extend(way(make_module(), backend=backend) for way, backend in zip(WAYS.values(), backends[1:], strict=True))
    safecompile.install()
    for call in calls:
        with switch_interval(1e-6):
            herd(call)
    assert [backend.count for backend in backends] == [1, 1, 1]


def test_a_first_call_of_a_function_inside_a_module_that_knows_nothing_is_compiled_once() -> None:
    """As transformers does it for flex attention: a compiled function, kept by a module that runs eagerly."""
    backend = CountingBackend()

    class Attention(nn.Module):
        inner = staticmethod(torch.compile(lambda q, k: (q @ k.mT).softmax(-1), backend=backend, dynamic=False))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.inner(x, x)
            return result

    with switch_interval(1e-6):
        outcomes = herd(Attention())
    x = torch.linspace(-1.0, 1.0, 8).reshape(2, 4)
    assert all(torch.equal(y, (x @ x.mT).softmax(-1)) for y, _ in outcomes)
    assert backend.count == 1


@pytest.mark.parametrize("way", ["Module.compile", "torch.compile", "function"])
def test_control_torch_alone_compiles_several_times(way: str) -> None:
    run_forked(
        """
        import sys
        import torch
        from tests.helpers.backends import CountingBackend
        from tests.helpers.threads import gather_threads, switch_interval
        from tests.test_third_party_compiles import THREADS, WAYS, make_module

        counts = []
        for attempt in range(20):
            backend = CountingBackend()
            if sys.argv[1] == "function":
                torch._dynamo.reset()
                call = torch.compile(lambda x: (x * x).sin(), backend=backend)
            else:
                call = WAYS[sys.argv[1]](make_module(), backend=backend)
            with switch_interval(1e-6):
                gather_threads(lambda _: call(torch.ones(2, 4)), THREADS)
            counts.append(backend.count)
            if counts[-1] > 1:
                break
        else:
            raise SystemExit(f"the fault never showed: {counts}")
        """,
        [way],
    ).check()
