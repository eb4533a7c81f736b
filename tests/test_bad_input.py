"""Bad input gets one clear error that says what to do, before any work."""

from __future__ import annotations

import functools
import pickle
import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import nn

import safecompile
from safecompile import UnsupportedCallableError, thread_safe_compile

pytestmark = pytest.mark.usefixtures("uninstalled_at_the_end")


async def coroutine(x: torch.Tensor) -> torch.Tensor:
    return x


async def async_generator(x: torch.Tensor) -> AsyncIterator[torch.Tensor]:
    yield x


def generator(x: torch.Tensor) -> Iterator[torch.Tensor]:
    yield x


class Holder:
    async def coroutine(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def generator(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield x

    @property
    def value(self) -> int:
        return 1


class AsyncCall:
    async def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


class GeneratorCall:
    def __call__(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield x


class AsyncForward(nn.Module):
    async def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class GeneratorForward(nn.Module):
    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield x


def scripted() -> Any:
    return torch.jit.script(nn.Linear(2, 2))


def traced() -> Any:
    return torch.jit.trace(nn.Linear(2, 2), torch.ones(2))


REFUSED: list[Any] = [
    pytest.param(lambda: coroutine, "coroutine", "is a coroutine function", id="coroutine"),
    pytest.param(lambda: async_generator, "async_generator", "is a coroutine function", id="async generator"),
    pytest.param(lambda: generator, "generator", "is a generator function", id="generator"),
    pytest.param(lambda: Holder().coroutine, "Holder.coroutine", "is a coroutine function", id="bound coroutine"),
    pytest.param(lambda: Holder.generator, "Holder.generator", "is a generator function", id="generator method"),
    pytest.param(lambda: classmethod(cast("Any", coroutine)), "coroutine", "is a coroutine function", id="classmethod"),
    pytest.param(lambda: staticmethod(generator), "generator", "is a generator function", id="staticmethod"),
    pytest.param(lambda: functools.partial(coroutine), "partial", "is a coroutine function", id="partial"),
    pytest.param(lambda: nn.Linear, "Linear", "is a class", id="module class"),
    pytest.param(lambda: int, "int", "is a class", id="class"),
    pytest.param(lambda: 3, "int", "is not callable", id="number"),
    pytest.param(lambda: "forward", "str", "is not callable", id="text"),
    pytest.param(lambda: torch.ones(2), "Tensor", "is not callable", id="tensor"),
    pytest.param(lambda: Holder.value, "property", "is not callable", id="property"),
    pytest.param(lambda: staticmethod(3), "int", "is not callable", id="staticmethod of nothing"),  # type: ignore[arg-type]
    pytest.param(lambda: nn.ModuleList([nn.Linear(2, 2)]), "ModuleList", "has no forward", id="ModuleList"),
    pytest.param(nn.ModuleDict, "ModuleDict", "has no forward", id="ModuleDict"),
    pytest.param(nn.Module, "Module", "has no forward", id="bare module"),
    pytest.param(AsyncCall, "AsyncCall", "is a coroutine function", id="async object"),
    pytest.param(GeneratorCall, "GeneratorCall", "is a generator function", id="generator object"),
    pytest.param(AsyncForward, "AsyncForward", "is a coroutine function", id="async forward"),
    pytest.param(GeneratorForward, "GeneratorForward", "is a generator", id="generator forward"),
]


@pytest.mark.parametrize(("make", "name", "problem"), REFUSED)
@pytest.mark.parametrize("how", ["call", "decorator"])
def test_what_cannot_be_compiled_is_refused_when_it_is_given(
    make: Callable[[], Any], name: str, problem: str, how: str
) -> None:
    given = make()
    decorate: Any = thread_safe_compile if how == "call" else thread_safe_compile(fullgraph=True)
    with pytest.raises(UnsupportedCallableError) as caught:
        decorate(given)
    first_line = str(caught.value).splitlines()[0]
    assert re.match(rf"thread_safe_compile cannot compile {re.escape(name)}\b.*: it {re.escape(problem)}", first_line)
    assert "; " in first_line, "the message says what to do"
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, safecompile.SafeCompileError)
    _pickles(caught.value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated:FutureWarning")  # from torch 2.15 on
@pytest.mark.parametrize("make", [scripted, traced])
def test_scripted_and_traced_modules_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(
        UnsupportedCallableError, match=r"is a scripted module; compile the module it was scripted from"
    ):
        thread_safe_compile(make())


def _pickles(error: BaseException) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))
        assert type(again) is type(error)
        assert str(again) == str(error)


def function(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@pytest.mark.parametrize(
    "options",
    [{"fullgrph": True}, {"model": function}, {"fn": function}, {"timeout": 3}],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("how", ["call", "decorator"])
def test_an_unknown_option_is_refused_at_decoration_and_the_known_ones_are_named(
    options: dict[str, Any], how: str
) -> None:
    given = (function,) if how == "call" else ()
    with pytest.raises(TypeError) as caught:
        thread_safe_compile(*given, **options)
    message = str(caught.value)
    assert message.startswith("thread_safe_compile() got options that torch.compile in torch ")
    assert next(iter(options)) in message
    for known in ("fullgraph", "dynamic", "backend", "mode", "options", "disable"):
        assert known in message
    _pickles(caught.value)


def test_all_unknown_options_are_named_at_once() -> None:
    with pytest.raises(TypeError, match=r"does not have: alpha, beta; it has"):
        thread_safe_compile(beta=1, fullgraph=True, alpha=2)


def test_every_option_of_torch_compile_passes_through() -> None:
    f = thread_safe_compile(function, fullgraph=True, dynamic=False, backend="eager", disable=False)
    assert torch.equal(f(torch.ones(2)), torch.full((2,), 2.0))
    assert thread_safe_compile(function, disable=True)(torch.ones(1)) == 2
    with pytest.raises(RuntimeError, match="Either mode or options can be specified"):
        thread_safe_compile(function, mode="default", options={})
    with pytest.raises(Exception, match="Invalid backend: 'no_such_backend'"):
        thread_safe_compile(function, backend="no_such_backend")


def test_a_refused_module_is_left_as_it_was() -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(TypeError):
        thread_safe_compile(module, fullgrph=True)
    with pytest.raises(RuntimeError, match="Either mode or options"):
        thread_safe_compile(module, mode="default", options={})
    assert type(module) is nn.Linear
    assert "forward" not in vars(module)


def test_an_already_compiled_module_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedCallableError, match=r"compiled; give the module that it was made from"):
        thread_safe_compile(torch.compile(nn.Linear(2, 2), backend="eager"))


def test_two_positional_arguments_are_a_type_error() -> None:
    with pytest.raises(TypeError):
        thread_safe_compile(function, function)  # type: ignore[call-overload]


ERRORS = sorted(
    name
    for name in safecompile.__all__
    if isinstance(value := getattr(safecompile, name), type) and issubclass(value, Exception)
)


@pytest.mark.parametrize("name", ERRORS)
def test_errors_pickle_with_their_text(name: str) -> None:
    _pickles(getattr(safecompile, name)("what happened; what to do"))


def test_warmup_refuses_what_it_cannot_call() -> None:
    f = thread_safe_compile(function, backend="eager")
    with pytest.raises(UnsupportedCallableError, match="warmup cannot call int"):
        safecompile.warmup(3, ())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"for one tensor x, give \(x,\)"):
        safecompile.warmup(f, torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no output needs a gradient"):
        safecompile.warmup(f, (torch.ones(2),), backward=True)


def test_bad_input_installs_nothing() -> None:
    installed = safecompile.statistics().installed
    bad: Any
    for bad in (3, coroutine, nn.ModuleList()):
        with pytest.raises(UnsupportedCallableError):
            thread_safe_compile(bad)
    assert safecompile.statistics().installed == installed
