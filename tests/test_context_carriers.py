"""What is set where a context is captured holds in workers of every kind, their backwards and their recomputations."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

import safecompile
from safecompile import UnsupportedCallableError, capture_context, checkpoint, thread_safe_compile
from tests.helpers.regions import stock
from tests.helpers.threads import gather_threads, run_threads
from tests.helpers.torch_version import RECOMPILE_LIMIT, TORCH

SECONDS = 30.0
THREAD_OWN_CONFIG = TORCH >= (2, 12)
thread_own_config = pytest.mark.skipif(
    not THREAD_OWN_CONFIG, reason="before torch 2.12 the configuration is the process's"
)


def elsewhere(function: Callable[[], Any]) -> Any:
    return run_threads([function])[0]


def configuration() -> tuple[Any, ...]:
    return (
        getattr(torch._dynamo.config, RECOMPILE_LIMIT),
        torch._inductor.config.triton.cudagraphs,
        torch._functorch.config.activation_memory_budget,
    )


def seen() -> dict[str, Any]:
    return {
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "device": torch.empty(0).device.type,
        "threads": torch.get_num_threads(),
        "config": configuration(),
    }


@contextlib.contextmanager
def intra_op_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def config() -> Iterator[None]:
    with (
        torch._dynamo.config.patch({RECOMPILE_LIMIT: 77}),
        torch._inductor.config.patch({"triton.cudagraphs": True}),
        torch._functorch.config.patch(activation_memory_budget=0.5),
    ):
        yield


@contextlib.contextmanager
def settings() -> Iterator[None]:
    with config(), torch.device("meta"), torch.autocast("cpu", torch.bfloat16), intra_op_threads(4):
        yield


# ------------------------------------------------------------------------------------------------------------- carriers


def used_before(work: Callable[[], Any]) -> Any:
    """Work on a thread that has used torch before: it has a number of intra-op threads of its own."""
    torch.get_num_threads()
    torch.set_num_threads(3)
    return work()


def thread(context: Any, work: Callable[[], Any]) -> Any:
    return elsewhere(lambda: used_before(functools.partial(context.run, work) if context else work))


def pool(context: Any, work: Callable[[], Any]) -> Any:
    start = context.apply if context else lambda: None
    with ThreadPoolExecutor(1, initializer=used_before, initargs=(start,)) as executor:
        return executor.submit(work).result(SECONDS)


def asyncio_to_thread(context: Any, work: Callable[[], Any]) -> Any:
    async def main() -> Any:
        return await asyncio.to_thread(used_before, functools.partial(context.run, work) if context else work)

    return asyncio.run(main())


def anyio_to_thread(context: Any, work: Callable[[], Any]) -> Any:
    async def main() -> Any:
        return await anyio.to_thread.run_sync(used_before, functools.partial(context.run, work) if context else work)

    return anyio.run(main)


def endpoint(context: Any, work: Callable[[], Any]) -> Any:
    """Do as FastAPI and Starlette with an endpoint that is a plain function."""

    async def main() -> Any:
        return await anyio.to_thread.run_sync(used_before, context.wrap(work) if context else work)

    return anyio.run(main)


CARRIERS = {carrier.__name__: carrier for carrier in (thread, pool, asyncio_to_thread, anyio_to_thread, endpoint)}
# These run what they are given in a copy of the caller's context, which from torch 2.12 on holds the configuration.
COPY_THE_CONTEXT = {"asyncio_to_thread", "anyio_to_thread", "endpoint"}
REGIONS: tuple[Callable[..., Any], ...] = (
    checkpoint,
    stock,
    functools.partial(checkpoint, preserve_rng_state=False),
    functools.partial(stock, preserve_rng_state=False),
)


class Step:
    """A training step, and what is seen where its parts run. With the patches, or with torch alone."""

    def __init__(self, *, library: bool = True) -> None:
        if library:
            safecompile.install()
        else:
            safecompile.uninstall()
        self._compilers = (thread_safe_compile, torch.compile) if library else (torch.compile,)
        self._regions = REGIONS if library else (stock,)
        self.forwards: list[Any] = []
        self.recomputations: list[Any] = []
        self.compiles: list[Any] = []
        """The configuration, in the compiles of forwards."""
        self.backward_compiles: list[Any] = []
        self.backward: Any = None

    def forward(self) -> torch.Tensor:
        x = torch.ones(4, device="cpu", requires_grad=True)
        y = x.sin()
        y.register_hook(lambda _: setattr(self, "backward", seen()))
        backend = aot_autograd(
            fw_compiler=functools.partial(self._note_and_compile, self.compiles),
            bw_compiler=functools.partial(self._note_and_compile, self.backward_compiles),
        )
        for compile_it in self._compilers:
            y = compile_it(eval("lambda y: y.cos() * 2"), backend=backend)(y)
        for region in self._regions:
            y = region(self._inner, y, seen_by=iter((self.forwards, self.recomputations)))
        return y.sum()

    def run(self) -> Step:
        self.forward().backward()
        return self

    def _inner(self, x: torch.Tensor, seen_by: Iterator[list[Any]]) -> torch.Tensor:
        next(seen_by).append(seen())
        return x.sin()

    def _note_and_compile(self, compiles: list[Any], graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiles.append(configuration())
        return make_boxed_func(graph.forward)


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("carrier", CARRIERS)
def test_all_that_is_set_holds_in_workers_their_backward_and_their_recomputations(carrier: str) -> None:
    with settings():
        mine, there = Step().run(), Step()
        CARRIERS[carrier](capture_context(), there.run)
        assert there.forwards == mine.forwards == [seen()] * 4
        # In any thread, torch itself takes the default device away around a backward, and may put it back in regions.
        there.recomputations = [{**one, "device": "meta"} for one in there.recomputations]
        assert there.recomputations == [seen()] * 4
        assert there.backward == mine.backward == {**seen(), "device": "cpu"}
        assert there.compiles == there.backward_compiles == [configuration()] * 2


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("carrier", CARRIERS)
def test_control_without_the_context_workers_have_other_settings(carrier: str) -> None:
    step = Step()
    with settings():
        mine = seen()
        CARRIERS[carrier](None, step.run)
    kept = {"config"} if carrier in COPY_THE_CONTEXT or not THREAD_OWN_CONFIG else set()
    for there in (*step.forwards, *step.recomputations, step.backward):
        assert {name for name in mine if there[name] == mine[name]} == kept
    for config_there in (*step.compiles, *step.backward_compiles):
        assert (config_there == mine["config"]) is bool(kept)


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("mode", MODES)
def test_grad_and_inference_mode_hold_in_workers_with_the_context_only(carrier: str, mode: str) -> None:
    def modes() -> tuple[bool, bool]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    with MODES[mode]():
        mine = modes()
        assert CARRIERS[carrier](capture_context(), modes) == mine
        assert CARRIERS[carrier](None, modes) == (True, False) != mine


# ---------------------------------------------------------------------------------- backwards and recomputation elsewhere


class Reenters(torch.autograd.Function):
    """Its backward does the work, at the end of a chain of backwards in each other."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int, work: Callable[[], object]) -> torch.Tensor:
        ctx.depth, ctx.work = depth, work
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.depth:
            in_a_thread_of_the_engine(ctx.work, ctx.depth - 1)
        else:
            ctx.work()
        return grad, None, None


def in_a_thread_of_the_engine(work: Callable[[], object], depth: int = 70) -> None:
    """Work in a thread of the engine's pool, which takes over where more than 60 backwards run in each other."""
    with torch.enable_grad():
        x = torch.ones(1, device="cpu", requires_grad=True)
        Reenters.apply(x, depth, work).backward()


PLACES: dict[str, Callable[[Callable[[], object]], object]] = {
    "plain thread": elsewhere,
    "thread of the engine": in_a_thread_of_the_engine,
}


def backward_in(place: str, step: Step) -> dict[str, Any]:
    """Run the step's forward with the settings, and after that its backward on another thread; return the settings."""
    with settings():
        mine, loss = seen(), step.forward()

    def work() -> None:
        assert threading.get_ident() != me
        before = seen()
        assert before["config"] != mine["config"]
        loss.backward()
        assert seen() == before

    me = threading.get_ident()
    PLACES[place](work)
    return mine


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("place", PLACES)
@thread_own_config
def test_a_backward_elsewhere_compiles_and_recomputes_with_its_forwards_configuration(place: str) -> None:
    step = Step()
    mine = backward_in(place, step)
    assert step.compiles == step.backward_compiles == [mine["config"]] * 2
    assert step.forwards == step.recomputations == [mine] * 4
    assert step.backward["config"] != mine["config"]


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("place", PLACES)
@thread_own_config
def test_control_with_torch_alone_a_backward_elsewhere_has_other_configuration(place: str) -> None:
    step = Step(library=False)
    mine = backward_in(place, step)
    assert step.compiles == [mine["config"]] != step.backward_compiles
    assert step.forwards == [mine]
    assert step.recomputations[0]["config"] != mine["config"]


class HoldsCopying:
    """A value that somebody else can be let in while it is copied, as it is where the configuration is hashed."""

    def __init__(self) -> None:
        self.inside, self.go_on = threading.Event(), threading.Event()

    def __deepcopy__(self, memo: Any) -> HoldsCopying:
        self.inside.set()
        assert self.go_on.wait(SECONDS)
        return self


def hash_while_another_thread_sets() -> list[Any]:
    """Hash the configuration while another thread with a copy of the same context sets a value; return the outcomes."""
    value, inductor, context = HoldsCopying(), torch._inductor.config, contextvars.Context()
    context.run(inductor.get_hash)
    context.run(setattr, inductor, "post_grad_custom_post_pass", value)

    def set_another() -> bytes:
        assert value.inside.wait(SECONDS)
        inductor.freezing = True
        value.go_on.set()
        inductor.post_grad_custom_post_pass = None
        return inductor.get_hash()

    copies = context.copy(), context.copy()
    return gather_threads([lambda: copies[0].run(inductor.get_hash), lambda: copies[1].run(set_another)])


@thread_own_config
def test_threads_with_copies_of_one_context_may_set_and_hash_the_configuration() -> None:
    safecompile.install()
    first, second = hash_while_another_thread_sets()
    with torch._inductor.config.patch(freezing=True):
        assert second == torch._inductor.config.get_hash()
    assert isinstance(first, bytes) and first not in {second, torch._inductor.config.get_hash()}


@thread_own_config
def test_control_with_torch_alone_hashing_fails_when_another_thread_sets_a_value() -> None:
    safecompile.uninstall()
    first, _ = hash_while_another_thread_sets()
    assert isinstance(first, RuntimeError) and "changed size" in str(first)


@pytest.mark.gpu
@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("library", [True, False])
@thread_own_config
def test_a_recomputation_in_a_device_thread_has_its_forwards_configuration_with_the_library_only(library: bool) -> None:
    (safecompile.install if library else safecompile.uninstall)()
    there: list[tuple[int, Any]] = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        there.append((threading.get_ident(), configuration()))
        return x.sin()

    x = torch.ones(4, device="cuda", requires_grad=True)
    with config():
        mine = configuration()
        stock(inner, x).sum().backward()
    (forward, _), (recomputation, seen_there) = there
    assert forward != recomputation
    assert (seen_there == mine) is library


@pytest.mark.parametrize("place", PLACES)
def test_a_recomputation_sees_the_context_variables_of_its_forward(place: str) -> None:
    variable, there = contextvars.ContextVar[int]("variable", default=0), []

    def inner(x: torch.Tensor) -> torch.Tensor:
        there.append(variable.get())
        return x.sin()

    variable.set(1)
    loss = checkpoint(inner, torch.ones(4, requires_grad=True)).sum()
    variable.set(2)
    PLACES[place](loss.backward)
    assert there == [1, 1] and variable.get() == 2


def test_two_threads_may_recompute_one_region_at_the_same_time() -> None:
    recomputing = threading.Barrier(2)

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if threading.current_thread() is not threading.main_thread():
            recomputing.wait(SECONDS)
        y: torch.Tensor = checkpoint(inner, x)
        return y.sin(), y.cos()

    x = torch.ones(4, requires_grad=True)
    outputs = checkpoint(both, x)

    def work(index: int) -> torch.Tensor:
        return torch.autograd.grad(outputs[index].sum(), x)[0]

    sin, cos = run_threads(work, 2)
    torch.testing.assert_close((sin, cos), ((x + 1).cos(), -(x + 1).sin()))


def test_a_failing_backward_compile_leaves_the_threads_configuration_alone(nothing_compiled: None) -> None:
    def fails(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        raise KeyError("mine")

    def compiles(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    call = thread_safe_compile(lambda x: x.sin(), backend=aot_autograd(fw_compiler=compiles, bw_compiler=fails))
    with config():
        loss = call(torch.ones(4, requires_grad=True)).sum()
    before = configuration()
    with pytest.raises(Exception, match="mine"):
        loss.backward()
    assert configuration() == before


# ----------------------------------------------------------------------------------------------------------------- wrap


no_grad = torch.no_grad()(capture_context)()


@no_grad.wrap
def of_module(a: int, b: str = "b") -> bool:
    """Tell the grad mode."""
    return torch.is_grad_enabled()


class Endpoints:
    @no_grad.wrap
    def method(self, a: int) -> tuple[object, int, bool]:
        return self, a, torch.is_grad_enabled()

    @staticmethod
    @no_grad.wrap
    def static(a: int) -> tuple[int, bool]:
        return a, torch.is_grad_enabled()

    @classmethod
    def of_class(cls) -> None: ...

    async def coroutine(self) -> None: ...

    def __call__(self) -> bool:
        return torch.is_grad_enabled()


def test_a_wrapped_function_keeps_what_it_is() -> None:
    assert of_module(1) is False and torch.is_grad_enabled()
    assert of_module.__name__ == "of_module" and of_module.__doc__ == "Tell the grad mode."
    assert str(inspect.signature(of_module)) == "(a: 'int', b: 'str' = 'b') -> 'bool'"
    assert not inspect.iscoroutinefunction(of_module)
    assert pickle.loads(pickle.dumps(of_module)) is of_module


def test_methods_and_callable_objects_may_be_wrapped() -> None:
    endpoints = Endpoints()
    assert endpoints.method(1) == (endpoints, 1, False)
    assert endpoints.static(1) == (1, False)
    assert no_grad.wrap(endpoints)() is False
    assert no_grad.wrap(functools.partial(of_module, 1))() is False


def test_a_wrapped_function_that_raises_puts_the_settings_back() -> None:
    @no_grad.wrap
    def fails() -> None:
        assert not torch.is_grad_enabled()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fails()
    assert torch.is_grad_enabled()


def test_threads_may_call_a_wrapped_function_at_the_same_time() -> None:
    inside = threading.Barrier(4)

    @no_grad.wrap
    def both() -> tuple[bool, bool]:
        inside.wait(SECONDS)
        first = torch.is_grad_enabled()
        inside.wait(SECONDS)
        return first, torch.is_grad_enabled()

    assert run_threads([both] * 4) == [(False, False)] * 4


async def coroutine() -> None: ...


async def async_generator() -> Any:
    yield


def generator() -> Any:
    yield


class Awaitable:
    async def __call__(self) -> None: ...


@pytest.mark.parametrize(
    "function",
    [
        coroutine,
        async_generator,
        generator,
        functools.partial(coroutine),
        Endpoints().coroutine,
        Awaitable(),
        Endpoints,
        staticmethod(of_module),
        vars(Endpoints)["of_class"],
        None,
        3,
    ],
)
def test_what_cannot_be_wrapped_is_refused(function: Any) -> None:
    with pytest.raises(UnsupportedCallableError, match="wrap cannot decorate"):
        no_grad.wrap(function)
