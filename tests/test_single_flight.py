"""Each graph is compiled once, however many threads ask for it."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from torch import nn

from safecompile import thread_safe_compile
from tests.helpers.backends import CountingBackend
from tests.helpers.subprocess_run import run_forked
from tests.helpers.threads import run_threads, switch_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.usefixtures("nothing_compiled")

THREADS = 16


@pytest.fixture
def narrow_races() -> Iterator[None]:
    with switch_interval(1e-6):
        yield


def polynomial(x: torch.Tensor) -> torch.Tensor:
    return (x * x + 2 * x).sin() + 1


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0))

    def forward(self, x: torch.Tensor, *, bias: float = 1.0) -> torch.Tensor:
        return x * self.weight + bias


class WithHelper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def herd(call: Callable[[torch.Tensor], Any], expected: Callable[[torch.Tensor], Any], rows: int = 2) -> None:
    """Let all threads make the same call at the same time, and compare what each got."""
    x = torch.randn(rows, 4)
    want = expected(x)
    for got in run_threads(lambda _: call(x), THREADS):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("options", [{}, {"fullgraph": True}], ids=str)
@pytest.mark.usefixtures("narrow_races")
def test_first_calls_of_16_threads_compile_once_and_each_new_shape_once(options: dict[str, Any]) -> None:
    backend = CountingBackend()
    f = thread_safe_compile(polynomial, backend=backend, dynamic=False, **options)
    herd(f, polynomial)
    assert backend.count == 1
    for new_shapes, rows in enumerate((3, 5, 7), start=1):
        herd(f, polynomial, rows)
        assert backend.count == 1 + new_shapes


def test_stock_torch_compiles_a_first_call_several_times() -> None:
    run_forked(
        """
        import threading, torch
        from tests.helpers.backends import CountingBackend
        from tests.helpers.threads import gather_threads, switch_interval

        counts = []
        for attempt in range(20):
            torch._dynamo.reset()
            backend = CountingBackend()
            f = torch.compile(lambda x: (x * x + 2 * x).sin() + 1, backend=backend, dynamic=False)
            x = torch.randn(2, 4)
            with switch_interval(1e-6):
                gather_threads(lambda _: f(x), 16)
            counts.append(backend.count)
            if counts[-1] > 1:
                break
        else:
            raise SystemExit(f"the fault never showed: {counts}")
        """
    ).check()


def count_with(n: int, shapes: list[tuple[int, ...]], **options: Any) -> int:
    torch._dynamo.reset()
    backend = CountingBackend()
    f = thread_safe_compile(polynomial, backend=backend, **options)
    for shape in shapes:
        x = torch.randn(shape)
        want = polynomial(x)
        for got in run_threads(lambda _, x=x: f(x), n):  # type: ignore[misc]
            torch.testing.assert_close(got, want)
    return backend.count


@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize(
    "shapes",
    [
        [(2, 4), (3, 4), (5, 4), (7, 4)],
        [(2, 4), (2, 5), (3, 5), (3, 6)],
        [(1, 4), (2, 4), (0, 4), (9, 4)],  # 0 and 1 are always compiled for themselves
        [(4,), (2, 4), (5,), (3, 4), (2, 3, 4)],
    ],
    ids=["rows", "rows and columns", "zero and one", "ranks"],
)
def test_16_threads_compile_exactly_what_one_thread_compiles(
    shapes: list[tuple[int, ...]], dynamic: bool | None
) -> None:
    alone = count_with(1, shapes, dynamic=dynamic)
    assert count_with(THREADS, shapes, dynamic=dynamic) == alone


def test_shapes_that_arrive_in_another_order_in_each_thread_are_compiled_once_each() -> None:
    backend = CountingBackend()
    f = thread_safe_compile(polynomial, backend=backend, dynamic=False)
    inputs = [torch.randn(rows, 4) for rows in range(2, 8)]
    want = [polynomial(x) for x in inputs]

    def work(index: int) -> None:
        for step in range(len(inputs)):
            which = (index + step) % len(inputs)
            torch.testing.assert_close(f(inputs[which]), want[which])

    run_threads(work, THREADS)
    assert backend.count == len(inputs)
    assert Counter(tuple(_input_shapes(g)[0]) for g in backend.graphs) == Counter(tuple(x.shape) for x in inputs)


def _input_shapes(graph: torch.fx.GraphModule) -> list[torch.Size]:
    return [node.meta["example_value"].shape for node in graph.graph.nodes if node.op == "placeholder"]


def test_mixed_shapes_at_once_with_automatic_dynamic_shapes_compile_two_graphs() -> None:
    backend = CountingBackend()
    f = thread_safe_compile(polynomial, backend=backend)
    inputs = [torch.randn(index + 2, 4) for index in range(THREADS)]
    for x, got in zip(inputs, run_threads(lambda index: f(inputs[index]), THREADS), strict=True):
        torch.testing.assert_close(got, polynomial(x))
    # The first shape as it is, then one for any number of rows: as one thread would, calling one after the other.
    assert backend.count == 2


def test_a_herd_leaves_the_recompile_limit_to_later_shapes() -> None:
    backend = CountingBackend()
    f = thread_safe_compile(polynomial, backend=backend, dynamic=False, fullgraph=True)
    limit = 8  # torch's default; under fullgraph the ninth compile raises FailOnRecompileLimitHit
    for rows in range(2, 2 + limit):
        herd(f, polynomial, rows)
    assert backend.count == limit


def test_stock_torch_uses_the_recompile_limit_up_with_one_shape() -> None:
    run_forked(
        """
        import torch
        from torch._dynamo import exc
        from tests.helpers.backends import CountingBackend
        from tests.helpers.threads import gather_threads, switch_interval

        # torch 2.6 raises the second one.
        too_often = exc.FailOnRecompileLimitHit, getattr(exc, "RecompileLimitExceeded", exc.FailOnRecompileLimitHit)
        for attempt in range(20):
            torch._dynamo.reset()
            f = torch.compile(lambda x: (x * x + 2 * x).sin() + 1, backend="eager", dynamic=False, fullgraph=True)
            failures = []
            with switch_interval(1e-6):
                for rows in range(2, 10):
                    x = torch.randn(rows, 4)
                    failures += [o for o in gather_threads(lambda _: f(x), 16) if isinstance(o, BaseException)]
                    if failures:
                        break
            if any(isinstance(failure, too_often) for failure in failures):
                break
        else:
            raise SystemExit(f"the fault never showed: {failures}")
        """
    ).check()


@pytest.mark.usefixtures("narrow_races")
def test_40_functions_and_8_threads_make_40_compiles() -> None:
    backend = CountingBackend()

    def make(constant: int) -> Callable[[torch.Tensor], torch.Tensor]:
        # Code of its own for each function, and from a file: closures over one code would be one table in Dynamo, as is
        # what torch 2.8 and older wrap functions from no file in.
        namespace: dict[str, Any] = {}
        exec(compile(f"def add_{constant}(x):\n    return x.sin() + {constant}\n", __file__, "exec"), namespace)
        return thread_safe_compile(namespace[f"add_{constant}"], backend=backend, fullgraph=True)

    functions = [make(constant) for constant in range(40)]
    x = torch.randn(4)

    def work(_: int) -> None:
        for constant, f in enumerate(functions):
            torch.testing.assert_close(f(x), x.sin() + constant)

    run_threads(work, 8)
    assert backend.count == 40


def test_closures_over_one_code_are_compiled_once_each() -> None:
    backend = CountingBackend()

    def make(constant: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return thread_safe_compile(lambda x: x.sin() + constant, backend=backend, dynamic=False)

    functions = [make(constant) for constant in range(4)]
    x = torch.randn(4)

    def work(index: int) -> None:
        for step in range(len(functions)):
            which = (index + step) % len(functions)
            torch.testing.assert_close(functions[which](x), x.sin() + which)

    run_threads(work, THREADS)
    assert backend.count == len(functions)


def test_16_threads_with_16_functions_compile_16_graphs() -> None:
    backend = CountingBackend()

    def make(constant: int) -> Callable[[torch.Tensor], torch.Tensor]:
        namespace: dict[str, Any] = {}
        exec(compile(f"def times_{constant}(x):\n    return x.cos() * {constant}\n", __file__, "exec"), namespace)
        return thread_safe_compile(namespace[f"times_{constant}"], backend=backend)

    functions = [make(constant) for constant in range(THREADS)]
    x = torch.randn(4)
    for constant, got in enumerate(run_threads(lambda index: functions[index](x), THREADS)):
        torch.testing.assert_close(got, x.cos() * constant)
    assert backend.count == THREADS
    assert len(set(backend.thread_names)) == THREADS


def test_guards_beside_shapes_decide_what_is_one_graph() -> None:
    backend = CountingBackend()
    f = thread_safe_compile(lambda x, flag, scale: x * scale if flag else x + scale, backend=backend, dynamic=False)
    calls = [(torch.randn(4), flag, scale) for flag in (True, False) for scale in (2, 3)]
    calls += [(x.double(), flag, scale) for x, flag, scale in calls[:2]]

    def work(index: int) -> None:
        for step in range(len(calls)):
            x, flag, scale = calls[(index + step) % len(calls)]
            torch.testing.assert_close(f(x, flag, scale), x * scale if flag else x + scale)

    run_threads(work, THREADS)
    assert backend.count == len(calls)


def test_a_grad_mode_is_a_graph_of_its_own_and_compiled_once() -> None:
    backend = CountingBackend()
    f = thread_safe_compile(polynomial, backend=backend, dynamic=False)
    x = torch.randn(4, requires_grad=True)

    def work(index: int) -> None:
        with torch.set_grad_enabled(index % 2 == 0):
            assert f(x).requires_grad == (index % 2 == 0)

    run_threads(work, THREADS)
    assert backend.count == 2


class Methods:
    scale: ClassVar[int] = 3

    def __init__(self, backend: CountingBackend) -> None:
        self.offset = 2.0
        self.held = thread_safe_compile(self.plain, backend=backend)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() * self.offset

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.cos() * self.offset


def decorated_methods(backend: CountingBackend) -> Any:
    class Decorated:
        scale: ClassVar[int] = 3

        @thread_safe_compile(backend=backend)
        def method(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin() * self.scale

        @thread_safe_compile(backend=backend)
        @classmethod
        def class_outside(cls, x: torch.Tensor) -> torch.Tensor:
            return x.sin() * cls.scale

        @classmethod
        @thread_safe_compile(backend=backend)
        def class_inside(cls, x: torch.Tensor) -> torch.Tensor:
            return x.sin() * cls.scale

        @thread_safe_compile(backend=backend)
        @staticmethod
        def static_outside(x: torch.Tensor) -> torch.Tensor:
            return x.sin() * 3

        @staticmethod
        @thread_safe_compile(backend=backend)
        def static_inside(x: torch.Tensor) -> torch.Tensor:
            return x.sin() * 3

    return Decorated


@pytest.mark.parametrize("name", ["method", "class_outside", "class_inside", "static_outside", "static_inside"])
@pytest.mark.parametrize("through", ["instance", "class"])
def test_methods_of_every_kind_are_compiled_once(name: str, through: str) -> None:
    backend = CountingBackend()
    cls = decorated_methods(backend)
    if through == "class" and name == "method":
        instance = cls()
        herd(lambda x: cls.method(instance, x), lambda x: x.sin() * 3)
    else:
        herd(getattr(cls if through == "class" else cls(), name), lambda x: x.sin() * 3)
    assert backend.count == 1


def test_many_instances_with_one_decorated_method_share_its_graph() -> None:
    backend = CountingBackend()
    cls = decorated_methods(backend)
    x = torch.randn(4)
    run_threads(lambda _: cls().method(x), THREADS)
    assert backend.count == 1


def test_bound_methods_and_callable_objects_are_compiled_once() -> None:
    backend = CountingBackend()
    instance = Methods(backend)
    herd(instance.held, lambda x: x.sin() * 2)
    assert backend.count == 1
    herd(thread_safe_compile(instance, backend=backend), lambda x: x.cos() * 2)
    assert backend.count == 2


@pytest.mark.parametrize(
    "make",
    [
        Scale,
        WithHelper,
        lambda: nn.Linear(4, 4),
        lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)),
        lambda: nn.Sequential(Scale(), Scale()),
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        lambda: nn.LayerNorm(4),
    ],
    ids=[
        "own forward",
        "submodules",
        "Linear",
        "Sequential",
        "Sequential of own",
        "TransformerEncoderLayer",
        "LayerNorm",
    ],
)
@pytest.mark.parametrize("how", ["in place", "bound forward"])
def test_modules_are_compiled_once(make: Callable[[], nn.Module], how: str) -> None:
    backend = CountingBackend()
    module = make()
    x = torch.randn(2, 4)
    want = module(x)
    if how == "in place":
        assert thread_safe_compile(module, backend=backend, fullgraph=True) is module
        call: Any = module
    else:
        call = thread_safe_compile(module.forward, backend=backend, fullgraph=True)
    for got in run_threads(lambda _: call(x), THREADS):
        torch.testing.assert_close(got, want)
    assert backend.count == 1


def test_16_modules_of_one_class_compiled_in_place_share_one_graph() -> None:
    backend = CountingBackend()
    modules = [thread_safe_compile(Scale(), backend=backend) for _ in range(THREADS)]
    for index, module in enumerate(modules):
        with torch.no_grad():
            module.weight.fill_(index)
    x = torch.randn(2, 4)
    for index, got in enumerate(run_threads(lambda index: modules[index](x), THREADS)):
        torch.testing.assert_close(got, x * index + 1)
    assert backend.count == 1


@pytest.mark.parametrize("kwargs", [{}, {"bias": 5.0}], ids=["", "kwargs"])
def test_hooks_run_once_a_call_and_the_module_is_compiled_once(kwargs: dict[str, Any]) -> None:
    backend = CountingBackend()
    module = Scale()
    calls: Counter[str] = Counter()
    lock = threading.Lock()

    def note(name: str) -> None:
        with lock:
            calls[name] += 1

    def pre(_: nn.Module, args: Any) -> Any:
        note("pre")
        return (args[0] + 1,)

    def pre_kwargs(_: nn.Module, args: Any, kwargs: Any) -> Any:
        note("pre kwargs")
        return args, {**kwargs, "bias": kwargs.get("bias", 1.0) + 1}

    def post(_: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        note("post")
        return output * 2

    def post_kwargs(_: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor:
        note("post kwargs")
        return output - kwargs["bias"]

    def always(*_: Any) -> None:
        note("always")

    module.register_forward_pre_hook(pre)
    module.register_forward_pre_hook(pre_kwargs, with_kwargs=True)
    thread_safe_compile(module, backend=backend, dynamic=False)
    module.register_forward_hook(post)  # after it was compiled, too
    module.register_forward_hook(post_kwargs, with_kwargs=True)
    module.register_forward_hook(always, always_call=True)

    x = torch.randn(2, 4)
    bias = kwargs.get("bias", 1.0) + 1
    want = ((x + 1) * module.weight + bias) * 2 - bias
    for got in run_threads(lambda _: module(x, **kwargs), THREADS):
        torch.testing.assert_close(got, want)
    assert backend.count == 1
    assert calls == dict.fromkeys(("pre", "pre kwargs", "post", "post kwargs", "always"), THREADS)


def test_hooks_of_a_submodule_run_once_a_call() -> None:
    backend = CountingBackend()
    module = WithHelper()
    module.first.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    module.first.register_forward_hook(lambda _, args, output: output + args[0].sum())
    x = torch.randn(2, 4)
    want = module(x)
    thread_safe_compile(module, backend=backend)
    for got in run_threads(lambda _: module(x), THREADS):
        torch.testing.assert_close(got, want)
    assert backend.count == 1


def test_a_hook_that_calls_a_cold_guarded_function_keeps_single_flight() -> None:
    backend = CountingBackend()
    inner = thread_safe_compile(polynomial, backend=backend)
    module = Scale()
    module.register_forward_pre_hook(lambda _, args: (inner(args[0]),))
    thread_safe_compile(module, backend=backend)
    x = torch.randn(2, 4)
    for got in run_threads(lambda _: module(x), THREADS):
        torch.testing.assert_close(got, polynomial(x) * module.weight + 1)
    assert backend.count == 2


def test_backward_hooks_of_a_module_compiled_in_place_run_once_a_call() -> None:
    backend = CountingBackend()
    module = Scale()
    calls: list[str] = []
    module.register_full_backward_hook(lambda *_: calls.append("backward"))
    thread_safe_compile(module, backend=backend)

    def work(_: int) -> None:
        x = torch.ones(2, 4, requires_grad=True)
        module(x).sum().backward()
        torch.testing.assert_close(x.grad, module.weight.detach().expand(2, 4))

    run_threads(work, THREADS)
    assert len(calls) == THREADS
    assert backend.count == 1


def test_plain_compiled_objects_over_guarded_code_do_not_disturb_single_flight() -> None:
    guarded_backend, plain_backend = CountingBackend(), CountingBackend()
    guarded = thread_safe_compile(polynomial, backend=guarded_backend, dynamic=False)
    plain = torch.compile(polynomial, backend=plain_backend, dynamic=False)
    x = torch.randn(4)
    run_threads(lambda index: (guarded if index % 2 else plain)(x), THREADS)
    assert guarded_backend.count == 1


def test_two_guarded_objects_over_one_function_and_backend_share_a_graph_in_all_threads() -> None:
    backend = CountingBackend()
    one, other = (thread_safe_compile(polynomial, backend=backend, dynamic=False) for _ in range(2))
    x = torch.randn(4)
    run_threads(lambda index: (one if index % 2 else other)(x), THREADS)
    torch._dynamo.reset()
    alone = CountingBackend()
    a, b = (thread_safe_compile(polynomial, backend=alone, dynamic=False) for _ in range(2))
    a(x), b(x)
    assert backend.count == alone.count
