"""A recomputation runs the compiled variant that its forward ran, whatever other threads compile or set meanwhile."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager, eager
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointError

import safecompile
from safecompile import checkpoint, thread_safe_compile
from tests.helpers import torch_version
from tests.helpers.backends import CountingBackend
from tests.helpers.regions import SECONDS, elsewhere, stock
from tests.helpers.threads import WorkersFailedError, run_threads, switch_interval
from tests.helpers.torch_version import RECOMPILE_LIMIT

Compiled = Callable[[Tensor], Tensor]
Around = Callable[[], contextlib.AbstractContextManager[object]]

LIMIT = getattr(torch._dynamo.config, RECOMPILE_LIMIT)
W = torch.linspace(-1, 1, 64).reshape(8, 8).requires_grad_()


def block(x: Tensor) -> Tensor:
    # A variant for all numbers of rows saves other tensors than one for a single number does.
    return torch.nn.functional.gelu(x @ W).view(-1)[: x.shape[0] * 4].sin().cos()


def rows(count: int) -> Tensor:
    return torch.linspace(-1, 1, count * 8).reshape(count, 8).requires_grad_()


class Variants:
    """A backend that notes which of its graphs run, by the order in which they were compiled."""

    def __init__(self, backend: Callable[..., Any] = eager) -> None:
        self.count = 0
        self.ran: list[int] = []
        self._backend = backend

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        index, self.count = self.count, self.count + 1
        run = self._backend(gm, example_inputs)

        def noted(*args: Any) -> Any:
            self.ran.append(index)
            return run(*args)

        return noted


@dataclass
class Way:
    """How a program compiles and makes regions."""

    compiler: Any
    checkpoint: Callable[..., Any]
    install: Callable[[], None]


WAYS = {
    "the library's": Way(thread_safe_compile, checkpoint, lambda: None),
    "torch's own, patches installed": Way(torch.compile, stock, safecompile.install),
}
TORCH = Way(torch.compile, stock, safecompile.uninstall)


@pytest.fixture
def library(nothing_compiled: None) -> Way:
    return WAYS["the library's"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, nothing_compiled: None) -> Way:
    way = WAYS[request.param]
    way.install()
    return way


@pytest.fixture
def torch_alone(nothing_compiled: None) -> Way:
    TORCH.install()
    return TORCH


@dataclass
class Step:
    """What was seen of one forward and backward."""

    forward: list[int]
    recomputation: list[int]
    compiled_in_backward: int
    right: bool


def step(way: Way, case: Case, backend: Variants) -> Step:
    compiled: Compiled = way.compiler(block, backend=backend, **case.options)
    for count in case.warm:
        compiled(rows(count))
    backend.ran.clear()
    x = rows(4)
    loss = way.checkpoint(compiled, x).sum()
    forward, backend.ran = backend.ran, []
    elsewhere(lambda: case.between(compiled))
    compiles, backend.ran = backend.count, []

    def backward() -> Tensor:
        with case.around():
            (grad,) = torch.autograd.grad(loss, x)
        return grad

    grad = elsewhere(backward)
    (expected,) = torch.autograd.grad(block(x).sum(), x)
    right = torch.allclose(grad, expected, atol=case.tolerance)
    return Step(forward, backend.ran, backend.count - compiles, right)


def call(*counts: int) -> Callable[[Compiled], None]:
    def between(compiled: Compiled) -> None:
        for count in counts:
            compiled(rows(count))

    return between


call_with_other_shapes = call(6, 7)


def call_with_dynamic_rows(compiled: Compiled) -> None:
    x = rows(5)
    torch._dynamo.mark_dynamic(x, 0)
    compiled(x)


def call_in(mode: Around) -> Callable[[Compiled], None]:
    def between(compiled: Compiled) -> None:
        with mode():
            call(4, 6)(compiled)
        call_with_other_shapes(compiled)

    return between


@contextlib.contextmanager
def intra_op_threads(more: int) -> Iterator[None]:
    mine = torch.get_num_threads()
    torch.set_num_threads(mine + more)
    try:
        yield
    finally:
        torch.set_num_threads(mine)


class Passing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _unchanged(x: Any) -> Any:
    return x


@dataclass
class Case:
    """What other threads call between forward and backward, and what is set on the thread of the backward."""

    between: Callable[[Compiled], None] = call_with_other_shapes
    around: Around = contextlib.nullcontext
    warm: tuple[int, ...] = (4,)
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-6


CASES = {
    "new shapes": Case(),
    "a shape that is dynamic by the caller's will": Case(call_with_dynamic_rows, options={"dynamic": False}),
    "shapes until the budget is used up": Case(call(*range(5, 18))),
    "shapes and calls without grad": Case(call_in(torch.no_grad)),
    "shapes and calls in inference mode": Case(call_in(torch.inference_mode)),
    "shapes and calls under autocast": Case(call_in(lambda: torch.autocast("cpu"))),
    "shapes and calls with other intra-op threads": Case(call_in(lambda: intra_op_threads(2))),
    "shapes; backward with other intra-op threads": Case(around=lambda: intra_op_threads(2)),
    "backward with other intra-op threads after warm shapes": Case(
        lambda _: None, lambda: intra_op_threads(2), warm=(4, 6)
    ),
    "shapes; backward without grad mode": Case(around=torch.no_grad),
    "shapes; backward under autocast": Case(around=lambda: torch.autocast("cpu"), tolerance=0.1),
    "shapes; backward with another default device": Case(around=lambda: torch.device("meta")),
    "shapes; backward in a function mode": Case(around=Passing),
    "shapes; backward under hooks of saved tensors": Case(
        around=lambda: torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged)
    ),
    "shapes; backward with another configuration": Case(
        around=lambda: torch._dynamo.config.patch({RECOMPILE_LIMIT: 1, "automatic_dynamic_shapes": False})
    ),
}
all_cases = pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])


@all_cases
def test_the_recomputation_runs_the_variant_of_its_forward(library: Way, case: Case) -> None:
    seen = step(library, case, Variants())
    assert seen.forward == seen.recomputation and len(seen.forward) == 1
    assert seen.compiled_in_backward == 0
    assert seen.right


def test_what_autograd_compiles_saves_the_same_tensors_in_the_recomputation(way: Way) -> None:
    seen = step(way, CASES["new shapes"], Variants(aot_eager))
    assert seen.forward == seen.recomputation and seen.right


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def matmul_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if before == "high" else "high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.xfail(strict=True, raises=WorkersFailedError, reason="the process's own settings are not put back")
@pytest.mark.parametrize("setting", [deterministic, matmul_precision])
def test_settings_of_the_whole_process_changed_between_do_no_harm(library: Way, setting: Around) -> None:
    assert step(library, Case(around=setting), Variants(aot_eager)).right


# -------------------------------------------------------------------------------------------------- orders of variants


def marked(count: int, width: int, dim: int) -> Tensor:
    x = torch.ones(count, width, requires_grad=True)
    torch._dynamo.mark_dynamic(x, dim)
    return x


def variants_after_a_call_of_the_other(way: Way) -> tuple[list[int], list[int]]:
    """Let two variants fit one argument, and another thread call the one that the forward did not run."""
    backend = Variants()
    compiled = way.compiler(lambda x: (x * x.shape[0]).sin(), backend=backend, dynamic=False)
    compiled(marked(5, 8, 0))
    compiled(marked(4, 9, 1))
    backend.ran.clear()
    x = rows(4)
    loss = way.checkpoint(compiled, x).sum()
    (forward,), backend.ran = backend.ran, []
    elsewhere(lambda: compiled(marked(4, 9, 1) if forward == 0 else marked(5, 8, 0)))
    backend.ran = []
    torch.autograd.grad(loss, x)
    assert backend.count == 2
    return [forward], backend.ran


def test_a_call_that_uses_another_variant_that_fits_does_not_change_which_is_used(way: Way) -> None:
    forward, recomputation = variants_after_a_call_of_the_other(way)
    assert forward == recomputation


def test_a_forward_that_runs_as_it_is_when_the_budget_is_used_up_is_recomputed_so(library: Way) -> None:
    backend = Variants()
    compiled = library.compiler(block, backend=backend, dynamic=False)
    is_told = torch_version.TORCH >= (
        2,
        7,
    )  # from then on the limit is each thread's own, and torch stops for that thread only
    with pytest.warns(RuntimeWarning, match="8 graphs for thread") if is_told else contextlib.nullcontext():
        call(*range(5, 18))(compiled)
    x, used_up = rows(4), backend.count
    backend.ran.clear()
    loss = library.checkpoint(compiled, x).sum()
    elsewhere(lambda: call(3, 6)(compiled))
    (grad,) = torch.autograd.grad(loss, x)
    (expected,) = torch.autograd.grad(block(x).sum(), x)
    assert torch.allclose(grad, expected)
    assert used_up == getattr(torch._dynamo.config, RECOMPILE_LIMIT)
    assert backend.count - used_up == is_told  # the other thread's call with 3 rows
    assert len(backend.ran) == 1 + is_told  # and its call with 6


# ------------------------------------------------------------------------------------------- intra-op threads, warm-up


def compiles_of_backwards_elsewhere(way: Way) -> list[int]:
    """Make steps whose backwards run on threads with other numbers of intra-op threads."""
    backend, counts = CountingBackend(), []
    compiled = way.compiler(block, backend=backend)
    for more in (1, 2, 1, 3):
        x = rows(4)
        loss = way.checkpoint(compiled, x).sum()

        def backward(loss: Tensor = loss, x: Tensor = x, more: int = more) -> tuple[Tensor, bool]:
            with intra_op_threads(more):
                before = torch.get_num_threads()
                (grad,) = torch.autograd.grad(loss, x)
                return grad, torch.get_num_threads() == before

        grad, same = elsewhere(backward)
        assert same, "the backward's thread has another number of intra-op threads than before"
        (expected,) = torch.autograd.grad(block(x).sum(), x)
        assert torch.allclose(grad, expected)
        counts.append(backend.count)
    return counts


def test_nothing_is_compiled_in_backwards_on_threads_with_other_intra_op_threads(way: Way) -> None:
    assert compiles_of_backwards_elsewhere(way) == [1] * 4


def test_a_recomputation_that_fails_leaves_the_threads_intra_op_threads_alone(library: Way) -> None:
    runs = 0

    def region(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        if runs == 2:
            raise KeyError("mine")
        return x.sin().exp()

    x = rows(4)
    loss = library.checkpoint(region, x).sum()
    with intra_op_threads(2):
        before = torch.get_num_threads()
        with pytest.raises(KeyError, match="mine"):
            torch.autograd.grad(loss, x)
        assert torch.get_num_threads() == before


def test_nested_regions_are_recomputed_with_the_intra_op_threads_of_their_forwards(library: Way) -> None:
    seen: list[int] = []

    def inner(x: Tensor) -> Tensor:
        seen.append(torch.get_num_threads())
        return x.sin().exp()

    def outer(x: Tensor) -> Tensor:
        result: Tensor = library.checkpoint(inner, x.cos())
        return result.sin()

    x = rows(4)
    loss = library.checkpoint(outer, x).sum()
    with intra_op_threads(2):
        torch.autograd.grad(loss, x)
    assert len(seen) == 3 and len(set(seen)) == 1


def cold_steps(way: Way) -> list[str]:
    """Let threads with shapes of their own begin with one compiled callable that is cold."""
    compiled = way.compiler(block, backend=Variants(aot_eager))
    between = threading.Barrier(4)

    def work(index: int) -> list[str]:
        outcomes = []
        for turn in range(3):
            x = rows(2 + (3 * index + turn) % 7)
            loss = way.checkpoint(compiled, x).sum()
            between.wait(SECONDS)
            try:
                (grad,) = torch.autograd.grad(loss, x)
            except CheckpointError:
                outcomes.append("CheckpointError")
                continue
            (expected,) = torch.autograd.grad(block(x).sum(), x)
            outcomes.append("right" if torch.allclose(grad, expected, atol=1e-6) else "wrong")
        return outcomes

    with switch_interval():
        return [outcome for outcomes in run_threads(work, 4) for outcome in outcomes]


def test_threads_with_shapes_of_their_own_may_all_begin_cold(library: Way) -> None:
    assert cold_steps(library) == ["right"] * 12


def test_more_threads_than_a_function_may_have_variants_begin_together(library: Way, nothing_is_known: None) -> None:
    """Before torch 2.9 each call in a region that looks for random numbers had a compile of its own, up to the limit."""
    backend = Variants(aot_eager)
    compiled, ready = library.compiler(scores, backend=backend), threading.Barrier(LIMIT + 2)

    def work(_: int) -> bool:
        x = torch.linspace(-1, 1, 256).reshape(2, 16, 8).requires_grad_()
        ready.wait(SECONDS)
        loss = library.checkpoint(compiled, x[:, :8]).sum()
        ready.wait(SECONDS)
        (grad,), (expected,) = torch.autograd.grad(loss, x), torch.autograd.grad(scores(x[:, :8]).sum(), x)
        return torch.allclose(grad, expected, atol=1e-6)

    assert run_threads(work, LIMIT + 2) == [True] * (LIMIT + 2)
    assert backend.count <= 2  # before torch 2.9 one for regions that look, and one for the others


def scores(x: Tensor) -> Tensor:
    # Of a product with rows that are not one after the other, eager saves other tensors than compiled code.
    return torch.nn.functional.linear(x, W.detach()).log_softmax(-1).square()


# ----------------------------------------------------------------------------------------------------------- controls

# Together, for installing the patches takes a second.


@all_cases
def test_control_with_torch_alone_the_recomputation_runs_another_variant(torch_alone: Way, case: Case) -> None:
    seen = step(torch_alone, case, Variants())
    assert seen.forward != seen.recomputation


def test_control_with_torch_alone_what_autograd_compiles_saves_other_tensors(torch_alone: Way) -> None:
    with pytest.raises(WorkersFailedError) as caught:
        step(torch_alone, CASES["new shapes"], Variants(aot_eager))
    assert isinstance(caught.value.errors[0], CheckpointError)


def test_control_with_torch_alone_the_variant_that_was_used_last_is_used_first(torch_alone: Way) -> None:
    forward, recomputation = variants_after_a_call_of_the_other(torch_alone)
    assert forward != recomputation


def test_control_with_torch_alone_backwards_on_such_threads_compile(torch_alone: Way) -> None:
    counts = compiles_of_backwards_elsewhere(torch_alone)
    assert counts == [2, 3, 3, 4]


def test_control_with_torch_alone_threads_that_begin_cold_meet_other_variants(torch_alone: Way) -> None:
    for _ in range(5):
        torch._dynamo.reset()
        if "CheckpointError" in cold_steps(torch_alone):
            return
    raise AssertionError("no recomputation ran another variant than its forward")
