"""Backwards that are compiled when first used are compiled once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from safecompile import fx_trace_lock, thread_safe_compile
from tests.helpers.backends import AotCountingBackend
from tests.helpers.subprocess_run import run_forked
from tests.helpers.threads import WorkersFailedError, run_threads, switch_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

pytestmark = pytest.mark.usefixtures("nothing_compiled")

THREADS = 16


def cubic(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * x * x


def gradient(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(cubic(x).sum(), x)[0]


@pytest.mark.parametrize("dynamic", [False, True])
def test_first_backwards_of_16_threads_through_one_graph_are_compiled_once(dynamic: bool) -> None:
    backend = AotCountingBackend()
    f = thread_safe_compile(cubic, backend=backend, dynamic=dynamic, fullgraph=True)
    x = torch.randn(5, 4)
    leaves = [x.clone().requires_grad_() for _ in range(THREADS)]
    outputs = [f(leaf).sum() for leaf in leaves]

    with switch_interval(1e-6):
        run_threads(lambda index: outputs[index].backward(), THREADS)
    assert (backend.forward.count, backend.backward.count) == (1, 1)
    for leaf in leaves:
        torch.testing.assert_close(leaf.grad, gradient(x))


def test_stock_torch_compiles_a_first_backward_several_times() -> None:
    run_forked(
        """
        import torch
        from tests.helpers.backends import AotCountingBackend
        from tests.helpers.threads import gather_threads, wait_until
        from tests.test_backward import cubic

        backend = AotCountingBackend(gated_backward=True)
        f = torch.compile(cubic, backend=backend, dynamic=False)
        outputs = [f(torch.randn(5, 4, requires_grad=True)).sum() for _ in range(2)]
        failed = []

        def second():
            backend.backward.entered.wait()
            try:
                outputs[1].backward()
            except RuntimeError as error:  # before torch 2.9, before it compiles: "Metric(s) ... have already been set"
                failed.append(error)

        def release():
            try:
                wait_until(lambda: backend.backward.count > 1 or failed)
            finally:
                backend.backward.release.set()

        ends = gather_threads([outputs[0].backward, second, release])
        assert ends[2] is None, ends
        """
    ).check()


def test_forward_and_backward_of_16_threads_at_once_are_compiled_once_each() -> None:
    backend = AotCountingBackend()
    f = thread_safe_compile(cubic, backend=backend, dynamic=False)

    def work(rows: int) -> None:
        x = torch.randn(rows, 4, requires_grad=True)
        f(x).sum().backward()
        torch.testing.assert_close(x.grad, gradient(x))

    for shapes, rows in enumerate((2, 3, 5), start=1):
        run_threads(lambda _, rows=rows: work(rows), THREADS)  # type: ignore[misc]
        assert (backend.forward.count, backend.backward.count) == (shapes, shapes)


def test_backwards_of_16_functions_are_compiled_once_each() -> None:
    backend = AotCountingBackend()

    def make(constant: int) -> Callable[[torch.Tensor], torch.Tensor]:
        namespace: dict[str, Any] = {}
        # With a file: older torch runs code without one through a function that all of it shares, and its budget.
        exec(compile(f"def power_{constant}(x):\n    return x.sin() ** {constant}\n", __file__, "exec"), namespace)
        return thread_safe_compile(namespace[f"power_{constant}"], backend=backend)

    functions = [make(constant) for constant in range(2, 2 + THREADS)]

    def work(index: int) -> None:
        x = torch.randn(4, requires_grad=True)
        functions[index](x).sum().backward()
        n = index + 2
        torch.testing.assert_close(x.grad, n * x.sin() ** (n - 1) * x.cos())

    run_threads(work, THREADS)
    assert (backend.forward.count, backend.backward.count) == (THREADS, THREADS)


def test_one_retained_graph_gives_each_thread_its_gradient() -> None:
    backend = AotCountingBackend()
    f = thread_safe_compile(cubic, backend=backend)
    x = torch.randn(4, requires_grad=True)
    loss = f(x).sum()
    for grad in run_threads(lambda _: torch.autograd.grad(loss, x, retain_graph=True)[0], THREADS):
        torch.testing.assert_close(grad, gradient(x))
    assert (backend.forward.count, backend.backward.count) == (1, 1)


def test_backward_called_on_one_retained_graph_adds_up() -> None:
    f = thread_safe_compile(lambda x, w: (x @ w).sin(), backend="aot_eager")
    w = torch.randn(4, 4)
    leaves = [torch.randn(2, 4, requires_grad=True) for _ in range(4)]
    losses = [f(leaf, w).sum() for leaf in leaves]

    def work(index: int) -> None:
        for _ in range(3):
            losses[index].backward(retain_graph=True)

    run_threads(work, 4)
    for leaf in leaves:
        torch.testing.assert_close(leaf.grad, 3 * ((leaf @ w).cos() @ w.T))


def test_a_second_derivative_through_eager_frames_is_right() -> None:
    # AOTAutograd has no double backward; Dynamo alone has, with graphs run as they are.
    f = thread_safe_compile(cubic, backend="eager")
    x = torch.randn(4, dtype=torch.double)

    def work(_: int) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(f(leaf).sum(), leaf, create_graph=True)
        return torch.autograd.grad(first.sum(), leaf)[0]

    want = 2 * x.sin() + 4 * x * x.cos() - x * x * x.sin()
    for got in run_threads(work, THREADS):
        torch.testing.assert_close(got, want)


def test_a_double_backward_that_aot_refuses_is_refused_in_every_thread() -> None:
    f = thread_safe_compile(cubic, backend="aot_eager")

    def work(_: int) -> None:
        leaf = torch.randn(4, requires_grad=True)
        (first,) = torch.autograd.grad(f(leaf).sum(), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            torch.autograd.grad(first.sum(), leaf)

    run_threads(work, THREADS)


def test_backwards_of_a_function_with_breaks_are_compiled_once() -> None:
    backend = AotCountingBackend()

    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() * x
        torch._dynamo.graph_break()
        return y * y

    f = thread_safe_compile(broken, backend=backend, dynamic=False)

    def work(_: int) -> None:
        x = torch.randn(4, requires_grad=True)
        x_ = x.detach().requires_grad_()
        f(x).sum().backward()
        ((x_.sin() * x_) ** 2).sum().backward()
        torch.testing.assert_close(x.grad, x_.grad)

    run_threads(work, THREADS)
    assert (backend.forward.count, backend.backward.count) == (2, 2)


def test_gradients_of_a_modules_parameters_are_right_in_replicas_that_share_a_graph() -> None:
    backend = AotCountingBackend()
    modules = [thread_safe_compile(nn.Linear(4, 2), backend=backend) for _ in range(THREADS)]
    x = torch.randn(3, 4)

    def work(index: int) -> None:
        modules[index](x).square().sum().backward()

    run_threads(work, THREADS)
    for module in modules:
        weight, bias = module.weight.detach().requires_grad_(), module.bias.detach().requires_grad_()
        want = torch.autograd.grad(torch.nn.functional.linear(x, weight, bias).square().sum(), (weight, bias))
        torch.testing.assert_close((module.weight.grad, module.bias.grad), want)
    assert (backend.forward.count, backend.backward.count) == (1, 1)


def test_a_compile_of_a_backward_holds_the_lock_and_the_run_of_it_does_not() -> None:
    from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
    from torch._dynamo.backends.common import aot_autograd

    held: list[tuple[str, bool]] = []

    def compiler(name: str) -> Callable[[torch.fx.GraphModule, Sequence[Any]], Any]:
        def compile_graph(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
            held.append((f"compile {name}", fx_trace_lock.owned()))

            def run(*args: Any) -> Any:
                held.append((f"run {name}", fx_trace_lock.statistics().locked))
                return gm.forward(*args)

            return make_boxed_func(run)

        return compile_graph

    backend = aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"))
    f = thread_safe_compile(cubic, backend=backend)
    for _ in range(2):
        f(torch.randn(4, requires_grad=True)).sum().backward()
    assert held == [
        ("compile forward", True),
        ("run forward", False),
        ("compile backward", True),
        ("run backward", False),
        ("run forward", False),
        ("run backward", False),
    ]


def test_warm_backwards_go_on_beside_the_first_compile_of_another_backward() -> None:
    warm_backend, cold_backend = AotCountingBackend(), AotCountingBackend(gated_backward=True)
    warm = thread_safe_compile(cubic, backend=warm_backend)
    cold = thread_safe_compile(lambda x: x.cos() * x, backend=cold_backend)

    def step(f: Callable[[torch.Tensor], torch.Tensor]) -> None:
        f(torch.randn(4, requires_grad=True)).sum().backward()

    step(warm)

    def keep_going() -> None:
        assert cold_backend.backward.entered.wait(30)
        for _ in range(100):
            step(warm)
        cold_backend.backward.release.set()

    run_threads([lambda: step(cold), keep_going])
    assert cold_backend.backward.count == 1


def test_a_backward_whose_compile_fails_fails_in_every_thread_and_leaves_the_lock_free() -> None:
    from torch._dynamo.backends.common import aot_autograd

    def failing(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        raise ArithmeticError("no such backward")

    f = thread_safe_compile(cubic, backend=aot_autograd(fw_compiler=lambda gm, _: gm.forward, bw_compiler=failing))

    def work(_: int) -> None:
        f(torch.randn(4, requires_grad=True)).sum().backward()

    with pytest.raises(WorkersFailedError) as caught:
        run_threads(work, THREADS)
    assert len(caught.value.errors) == THREADS
    assert all("no such backward" in str(error) for error in caught.value.errors.values())
    assert not fx_trace_lock.statistics().locked
    assert torch.equal(thread_safe_compile(torch.neg, backend="eager")(torch.ones(2)), -torch.ones(2))
