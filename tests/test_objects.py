"""Guarded callables behave as people rely on objects to behave: copy, pickle, signature, inlining, other tracers."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from safecompile import thread_safe_compile
from tests.helpers.backends import CountingBackend
from tests.helpers.subprocess_run import run_forked
from tests.helpers.threads import run_threads
from tests.helpers.torch_version import TORCH, limit

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("nothing_compiled")

compiles = CountingBackend()


def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
    """A backend that pickle finds by its name."""
    return compiles(gm, example_inputs)


@pytest.fixture(autouse=True)
def count_from_zero() -> None:
    compiles._compiles.clear()


@thread_safe_compile(backend=backend)
def decorated(x: torch.Tensor, *, factor: float = 2.0) -> torch.Tensor:
    """Scale."""
    return x * factor


@thread_safe_compile(backend=backend)
def twice(x: torch.Tensor) -> torch.Tensor:
    return decorated(decorated(x))


class WithMethod(nn.Module):
    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), value))

    @thread_safe_compile(backend=backend)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class WithBoundMethod(nn.Module):
    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), value))
        self.fast = thread_safe_compile(self.slow, backend=backend)

    def slow(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fast(x)


class Plain(nn.Module):
    """A plain module."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Container(nn.Module):
    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.inside = thread_safe_compile(Plain(value), backend=backend)

    @property
    def weight(self) -> torch.Tensor:
        return self.inside.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x)


class OwnForward(Plain):
    def __init__(self, value: float = 1.0) -> None:
        super().__init__(value)
        self.forward = thread_safe_compile(self.forward, backend=backend)  # type: ignore[method-assign]


def in_place(value: float = 1.0) -> nn.Module:
    return thread_safe_compile(Plain(value), backend=backend)


def copied(module: Any) -> Any:
    return copy.deepcopy(module)


def saved(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


MODELS: list[Any] = [WithMethod, WithBoundMethod, in_place, Container, OwnForward]
# pickle stores a bound method as its object and name, and the name finds the class's own function.
by_name = pytest.mark.xfail(
    strict=True, reason="pickle finds an instance's bound method by the name it has in the class"
)


@pytest.mark.parametrize(
    ("make", "how"),
    [
        *[(make, copied) for make in MODELS],
        *[
            pytest.param(make, how, marks=[by_name] if make in (WithBoundMethod, OwnForward) else [])
            for make in MODELS
            for how in (saved, pickled)
        ],
    ],
)
def test_a_copy_of_a_model_is_guarded_and_runs_its_own_weights(make: Any, how: Any) -> None:
    model = make(2.0)
    x = torch.ones(3)
    assert torch.equal(model(x), torch.full((3,), 2.0))
    twin = how(model)
    with torch.no_grad():
        twin.weight.fill_(7.0)
    assert torch.equal(model(x), torch.full((3,), 2.0))
    compiles._compiles.clear()
    for got in run_threads(lambda _: twin(x.expand(2, 3)), 8):
        assert torch.equal(got, torch.full((2, 3), 7.0))
    assert compiles.count == 1  # the number of dimensions is new, and compiled for once
    assert list(twin.state_dict()) == list(model.state_dict())


def test_copy_copy_of_a_module_is_guarded_and_shares_its_parameters() -> None:
    model = in_place(2.0)
    twin = copy.copy(model)
    assert twin is not model
    assert twin.weight is model.weight
    run_threads(lambda _: twin(torch.ones(3)), 8)
    assert compiles.count == 1
    assert torch.equal(twin(torch.ones(3)), model(torch.ones(3)))


def test_a_copy_of_a_copy_is_still_guarded_and_of_the_same_class() -> None:
    model = in_place()
    twin = copy.deepcopy(copy.copy(copy.deepcopy(model)))
    assert type(twin) is type(model)
    assert isinstance(twin, Plain)


@pytest.mark.parametrize("make", [WithMethod, in_place, Container])
def test_a_data_parallel_replica_is_guarded_and_runs_its_own_weights(make: Any) -> None:
    model = make(2.0)
    replica = model._replicate_for_data_parallel()
    if make is Container:
        replica.inside = model.inside._replicate_for_data_parallel()
        replica.inside.weight = torch.full((3,), 9.0)
    else:
        replica.weight = torch.full((3,), 9.0)
    run_threads(lambda _: replica(torch.ones(3)), 8)
    assert torch.equal(replica(torch.ones(3)), torch.full((3,), 9.0))
    assert torch.equal(model(torch.ones(3)), torch.full((3,), 2.0))
    assert compiles.count == 2  # a replica's weights are tensors, the model's are parameters


def test_state_dict_keys_repr_and_mode_are_those_of_the_module() -> None:
    plain, model = Plain(), in_place()
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert repr(model) == repr(plain)
    assert (type(model).__name__, type(model).__qualname__, type(model).__module__, type(model).__doc__) == (
        Plain.__name__,
        Plain.__qualname__,
        Plain.__module__,
        Plain.__doc__,
    )
    assert not model.eval().training
    plain.load_state_dict(in_place(4.0).state_dict())
    assert plain.weight[0] == 4.0
    assert model.to(torch.double)(torch.ones(3, dtype=torch.double)).dtype == torch.double


def test_compiling_a_module_twice_guards_it_once_with_the_new_options() -> None:
    other = CountingBackend()
    model = in_place(2.0)
    assert thread_safe_compile(model, backend=other) is model
    model(torch.ones(3))
    assert (compiles.count, other.count) == (0, 1)


def test_super_and_type_checks_work_in_a_module_compiled_in_place() -> None:
    class Child(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    model = thread_safe_compile(Child(2.0), backend=backend, fullgraph=True)
    assert isinstance(model, Child)
    assert torch.equal(model(torch.ones(3)), torch.full((3,), 3.0))


def test_a_decorated_forward_that_a_subclass_calls_by_super_is_one_graph_in_an_outer_compile() -> None:
    class Child(WithMethod):
        @thread_safe_compile(backend=backend)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    model = Child(2.0)
    for got in run_threads(lambda _: model(torch.ones(3)), 8):
        assert torch.equal(got, torch.full((3,), 3.0))
    assert compiles.count == 1


def test_a_lazy_module_is_still_guarded_when_it_has_its_shapes() -> None:
    model = thread_safe_compile(nn.LazyLinear(3), backend=backend, dynamic=False)
    model(torch.ones(2, 4))
    model(torch.ones(3, 4))
    assert compiles.count == 2


def test_a_forward_set_on_the_instance_is_guarded() -> None:
    model = Plain(2.0)
    model.forward = lambda x: x - 1  # type: ignore[method-assign]
    thread_safe_compile(model, backend=backend)
    for got in run_threads(lambda _: model(torch.ones(3)), 8):
        assert torch.equal(got, torch.zeros(3))
    assert compiles.count == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_parametrized_module_is_guarded_and_copies(when: str) -> None:
    model = nn.Linear(3, 3)
    if when == "before":
        nn.utils.parametrizations.weight_norm(model)
    thread_safe_compile(model, backend=backend)
    if when == "after":
        nn.utils.parametrizations.weight_norm(model)
    x = torch.randn(2, 3)
    want = model(x)
    twin = copy.deepcopy(model)
    for got in run_threads(lambda _: twin(x), 8):
        torch.testing.assert_close(got, want)
    assert compiles.count == 1


def test_a_module_parametrized_between_two_compiles_keeps_its_parametrization() -> None:
    model = thread_safe_compile(nn.Linear(3, 3), backend=backend)
    nn.utils.parametrizations.weight_norm(model)
    x = torch.randn(2, 3)
    want = model(x)
    torch.testing.assert_close(thread_safe_compile(model, backend=backend, fullgraph=True)(x), want)


def test_a_class_put_on_top_of_the_guarded_one_copies() -> None:
    model = in_place(2.0)
    model.__class__ = type("Wrapped", (type(model),), {"__module__": __name__})
    twin = copy.deepcopy(model)
    assert torch.equal(twin(torch.ones(3)), torch.full((3,), 2.0))


def test_a_base_class_that_registers_its_subclasses_sees_no_new_one() -> None:
    registered: list[str] = []

    class Base(nn.Module):
        def __init_subclass__(cls, *, tag: str, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            registered.append(tag)

    class Model(Base, tag="model"):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    model = thread_safe_compile(Model(), backend=backend)
    assert torch.equal(model(torch.ones(2)), torch.full((2,), 2.0))
    assert registered == ["model"]


def test_a_traced_graph_module_is_guarded_and_its_copy_runs_its_own_weights() -> None:
    model = thread_safe_compile(torch.fx.symbolic_trace(Plain(2.0)), backend=backend)
    x = torch.ones(3)
    for got in run_threads(lambda _: model(x), 8):
        assert torch.equal(got, torch.full((3,), 2.0))
    assert compiles.count == 1
    twin = copy.deepcopy(model)
    twin.load_state_dict({"weight": torch.full((3,), 5.0)})
    assert torch.equal(twin(x), torch.full((3,), 5.0))
    assert torch.equal(model(x), torch.full((3,), 2.0))


def test_a_decorated_function_keeps_its_name_doc_and_signature() -> None:
    def scale(x: torch.Tensor, *, factor: float = 2.0) -> torch.Tensor:
        """Scale."""
        return x * factor

    guarded = thread_safe_compile(scale, backend=backend)
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__"):
        assert getattr(guarded, name) == getattr(scale, name)
    assert inspect.signature(guarded) == inspect.signature(scale)
    assert inspect.isfunction(guarded)
    assert inspect.unwrap(guarded) is scale
    assert guarded.__wrapped__ is scale  # type: ignore[attr-defined]
    assert str(inspect.signature(decorated)).startswith("(x: 'torch.Tensor', *, factor: 'float' = 2.0)")
    assert inspect.signature(WithMethod().forward) == inspect.signature(Plain().forward)
    assert inspect.signature(in_place().forward) == inspect.signature(Plain().forward)
    with pytest.raises(AttributeError):
        guarded.no_such_attribute  # type: ignore[attr-defined]  # noqa: B018


def test_a_decorated_method_binds_as_methods_do() -> None:
    class Owner:
        @thread_safe_compile(backend=backend)
        def method(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    owner = Owner()
    assert owner.method.__self__ is owner  # type: ignore[attr-defined]
    assert owner.method == owner.method
    assert Owner.method is vars(Owner)["method"]
    bound = thread_safe_compile(owner.method, backend=backend)
    assert bound.__self__ is owner
    assert torch.equal(bound(torch.ones(1)), torch.full((1,), 2.0))
    assert copy.deepcopy(owner).method(torch.ones(1)) == 2


@pytest.mark.parametrize(
    ("make", "name"),
    [
        pytest.param(lambda: Call(1), "Call", id="callable object"),
        pytest.param(lambda: functools.partial(torch.add, 1), "partial", id="partial"),
    ],
)
def test_a_callable_object_gives_a_function_with_its_signature(make: Callable[[], Any], name: str) -> None:
    given = make()
    guarded = thread_safe_compile(given, backend=backend)
    assert torch.equal(guarded(torch.ones(2)), torch.full((2,), 2.0))
    assert inspect.unwrap(guarded) is given
    assert "inner" not in guarded.__qualname__


class Call:
    """Adds a number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.number


def test_a_decorated_function_copies_and_pickles_by_its_name() -> None:
    assert copy.copy(decorated) is decorated
    assert copy.deepcopy(decorated) is decorated
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(decorated, protocol)) is decorated
    model = WithMethod(3.0)
    method = pickle.loads(pickle.dumps(model.forward))
    assert torch.equal(method(torch.ones(3)), torch.full((3,), 3.0))


def test_decorated_functions_and_modules_reach_a_spawned_process() -> None:
    run_forked(
        """
        import multiprocessing, torch
        from safecompile import thread_safe_compile

        @thread_safe_compile(backend="eager")
        def double(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        def work(function, model, results):
            from safecompile import statistics
            value = function(torch.ones(2)) + model(torch.ones(2))
            results.put((value.tolist(), statistics().compiled))

        if __name__ == "__main__":
            double(torch.ones(2))
            model = thread_safe_compile(torch.nn.Linear(2, 2), backend="eager")
            with torch.no_grad():
                model.weight.fill_(1.0), model.bias.fill_(0.5)
            context = multiprocessing.get_context("spawn")
            results = context.SimpleQueue()
            process = context.Process(target=work, args=(double, model.requires_grad_(False), results))
            process.start()
            value, compiled = results.get()
            process.join()
            assert value == [4.5, 4.5], value
            assert compiled == 2, compiled
        """,
        timeout=100,
    ).check()


INLINED: dict[str, Callable[[], tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]]]
INLINED = {
    "function": lambda: (decorated, lambda x: x * 2),
    "method": lambda: (WithMethod(3.0), lambda x: x * 3),
    "method called": lambda: (WithMethod(3.0).forward, lambda x: x * 3),
    "bound method held": lambda: (WithBoundMethod(4.0), lambda x: x * 4),
    "module in place": lambda: (in_place(5.0), lambda x: x * 5),
    "module in a module": lambda: (Container(6.0), lambda x: x * 6),
    "static method": lambda: (vars(Static)["static"].__func__, lambda x: x * 3),
    "static and class methods": lambda: (Static.both, lambda x: x * 3 + x + 2),
    "guarded in guarded": lambda: (twice, lambda x: x * 4),
}


class Static:
    number = 2

    @staticmethod
    @thread_safe_compile(backend=backend)
    def static(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @thread_safe_compile(backend=backend)
    @classmethod
    def cls_method(cls, x: torch.Tensor) -> torch.Tensor:
        return x + cls.number

    @staticmethod
    def both(x: torch.Tensor) -> torch.Tensor:
        return Static.static(x) + Static.cls_method(x)


CLASS_METHODS = pytest.mark.xfail(
    TORCH >= (2, 15), strict=True, reason="torch 2.15 cannot inline a compiled class method, a plain one neither"
)
KIND_MARKS = {
    "static and class methods": [CLASS_METHODS],
    "bound method held": [limit((2, 13), "to inline a bound method of a compiled function that a module holds")],
}


@pytest.mark.parametrize("outer", ["torch.compile", "guarded"])
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=KIND_MARKS.get(kind, [])) for kind in INLINED],
)
@pytest.mark.parametrize("cold", [True, False], ids=["cold", "warm"])
def test_an_outer_compile_inlines_a_guarded_callable_into_one_graph(kind: str, outer: str, cold: bool) -> None:
    inner, want = INLINED[kind]()
    x = torch.randn(3)
    if not cold:
        inner(x)
    outer_backend = CountingBackend()
    compile_it: Any = torch.compile if outer == "torch.compile" else thread_safe_compile
    f = compile_it(lambda x: inner(x).sin() + 1, backend=outer_backend, fullgraph=True)
    before = compiles.count
    for got in run_threads(lambda _: f(x), 8 if outer == "guarded" else 1):
        torch.testing.assert_close(got, want(x).sin() + 1)
    assert (outer_backend.count, compiles.count - before) == (1, 0)


def stock(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="eager")


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    return thread_safe_compile(function, backend="eager")


def scale(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


class Calls(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x) + 1


def by_symbolic_trace(f: Callable[..., Any]) -> Any:
    return torch.fx.symbolic_trace(Calls(f)).code


def by_make_fx(f: Callable[..., Any]) -> Any:
    return make_fx(lambda x: f(x) + 1)(torch.ones(3)).code


def by_export(f: Callable[..., Any]) -> Any:
    return torch.export.export(Calls(f), (torch.ones(3),), strict=False).graph_module.code


def by_strict_export(f: Callable[..., Any]) -> Any:
    return torch.export.export(Calls(f), (torch.ones(3),), strict=True).graph_module.code


def by_vmap(f: Callable[..., Any]) -> Any:
    return torch.vmap(f)(torch.arange(6.0).reshape(2, 3))


def by_grad(f: Callable[..., Any]) -> Any:
    return torch.func.grad(lambda x: f(x).sum())(torch.arange(3.0))


def by_jacobian(f: Callable[..., Any]) -> Any:
    return torch.func.jacrev(f)(torch.arange(3.0))


def by_jit_trace(f: Callable[..., Any]) -> Any:
    return str(torch.jit.trace(Calls(f), torch.ones(3)).graph)


def by_functional_call(f: Callable[..., Any]) -> Any:
    return torch.func.functional_call(Calls(f), {}, (torch.arange(3.0),))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize(
    "how",
    [
        by_symbolic_trace,
        by_make_fx,
        by_export,
        by_strict_export,
        by_vmap,
        by_grad,
        by_jacobian,
        by_jit_trace,
        by_functional_call,
    ],
)
def test_other_transformations_do_with_a_guarded_callable_what_they_do_with_a_stock_one(how: Any, warm: bool) -> None:
    outcomes = []
    for make in (stock, guarded):
        torch._dynamo.reset()
        f = make(scale)
        if warm:
            f(torch.ones(3))
        try:
            outcomes.append(("returned", how(f)))
        except Exception as error:
            outcomes.append((type(error).__name__, str(error).splitlines()[0]))
    (stock_kind, stock_value), (kind, value) = outcomes
    assert kind == stock_kind, outcomes
    if isinstance(value, torch.Tensor):
        torch.testing.assert_close(value, stock_value)
    else:
        assert value == stock_value
