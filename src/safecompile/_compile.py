"""``thread_safe_compile``: ``torch.compile`` for callables that several threads call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, ParamSpec, TypeVar, cast, overload

import torch

from safecompile._core.errors import UnsupportedCallableError
from safecompile._core.guarded import WHEN_COMPILING, Guarded, WhenCompiling
from safecompile._patches import patches

__all__ = ["thread_safe_compile"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_M = TypeVar("_M", bound=torch.nn.Module)
_F = TypeVar("_F")


@overload
def thread_safe_compile(
    fn: None = None,
    /,
    *,
    when_compiling: WhenCompiling = ...,
    recompile_limit: int | None = ...,
    **torch_compile_options: Any,
) -> Callable[[_F], _F]: ...
@overload
def thread_safe_compile(
    fn: _M, /, *, when_compiling: WhenCompiling = ..., recompile_limit: int | None = ..., **torch_compile_options: Any
) -> _M: ...
@overload
def thread_safe_compile(
    fn: classmethod[Any, _P, _R],
    /,
    *,
    when_compiling: WhenCompiling = ...,
    recompile_limit: int | None = ...,
    **torch_compile_options: Any,
) -> classmethod[Any, _P, _R]: ...
@overload
def thread_safe_compile(
    fn: staticmethod[_P, _R],
    /,
    *,
    when_compiling: WhenCompiling = ...,
    recompile_limit: int | None = ...,
    **torch_compile_options: Any,
) -> staticmethod[_P, _R]: ...
@overload
def thread_safe_compile(
    fn: Callable[_P, _R],
    /,
    *,
    when_compiling: WhenCompiling = ...,
    recompile_limit: int | None = ...,
    **torch_compile_options: Any,
) -> Callable[_P, _R]: ...
def thread_safe_compile(
    fn: Any = None,
    /,
    *,
    when_compiling: WhenCompiling = "wait",
    recompile_limit: int | None = None,
    **torch_compile_options: Any,
) -> Any:
    """Compile ``fn`` so that any number of threads may call it at the same time, cold or warm.

    Each graph is compiled once, however many threads ask for it; Dynamo's own guards decide what the
    same graph is. A call whose code is compiled takes no lock and never waits for a compile. A compile
    that fails raises in its own thread; threads that waited for it try for themselves.

    Use it as ``@thread_safe_compile``, as ``@thread_safe_compile(fullgraph=True)`` or as a call.

    Args:
        fn: a function, a method (bound, or in a class body), a classmethod or staticmethod, a callable
            object, or an ``nn.Module`` instance. A module is compiled in place: the same object is
            returned, its ``state_dict`` keys are unchanged, its hooks run around the compiled ``forward``.
        when_compiling: what a call does that needs a graph while another thread compiles. ``"wait"``: it waits. ``"eager"``:
            it runs the original function, this once, so that requests are answered while one thread compiles. ``"error"``:
            it raises ``CompileInProgressError``; in the middle of a call, after a graph break, the rest runs eagerly. What
            such a call calls that is compiled by itself does as it was told itself. In a checkpointed region all wait,
            because a recomputation has to find what the forward has saved, and so does the first backward through a graph.
        recompile_limit: how many graphs each function may have for the same thread, modules and devices before further
            calls run eagerly, with a warning; by default ``torch._dynamo.config.recompile_limit`` (8). Threads, replicas of
            a module, and devices each have the whole limit to themselves (pytorch#177355); what threads have left that have
            ended counts for ``accumulated_recompile_limit`` (256). It stands for torch's own option of this name.
        **torch_compile_options: every option of ``torch.compile``.

    Returns:
        A plain function with the name and signature of ``fn`` (a bound method for a bound method), or
        the module.

    Raises:
        UnsupportedCallableError: ``fn`` is not callable, is a class, a coroutine or generator function,
            a scripted module, or a module without a ``forward``.
        TypeError: an option that ``torch.compile`` does not have.
        ValueError: another ``when_compiling``, a ``recompile_limit`` below 1, or ``backend="cudagraphs"``.
        CompileInProgressError: by calls, with ``when_compiling="error"``.
        torch._dynamo.exc.FailOnRecompileLimitHit: by calls beyond the limit, with ``fullgraph=True``.
    """
    _check_options(torch_compile_options)
    if when_compiling not in WHEN_COMPILING:
        raise ValueError(f"when_compiling is one of {', '.join(map(repr, WHEN_COMPILING))}, not {when_compiling!r}.")
    limit: Any = recompile_limit  # whatever was given
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ValueError(f"recompile_limit is how many graphs a function may have, 1 or more, not {recompile_limit!r}.")
    options = {**torch_compile_options, "when_compiling": when_compiling, "recompile_limit": recompile_limit}
    if fn is None:
        return functools.partial(_thread_safe_compile, options=options)
    return _thread_safe_compile(fn, options=options)


def _thread_safe_compile(fn: Any, *, options: dict[str, Any]) -> Any:
    if isinstance(fn, (classmethod, staticmethod)):
        return type(fn)(_thread_safe_compile(fn.__func__, options=options))
    _check_callable(fn)
    if isinstance(fn, torch.nn.Module):
        if "forward" in vars(fn):  # somebody has wrapped this instance's forward
            fn.forward = _thread_safe_compile(fn.forward, options=options)
            return fn
        fn.__class__ = _guarded_class(type(fn), options)
        return fn
    if isinstance(fn, MethodType):
        return MethodType(_guard(fn.__func__, options), fn.__self__)
    return _guard(fn, options)


def _guard(function: Callable[_P, _R], options: dict[str, Any]) -> Callable[_P, _R]:
    function = getattr(function, "__safecompile_original__", function)
    own = {name: options[name] for name in _OWN_OPTIONS}
    compiled = _torch_compile(function, **{name: options[name] for name in options if name not in own})
    if compiled is function:  # disable=True
        return function

    named: Any = function if hasattr(function, "__name__") else type(function)  # a callable object
    record = Guarded(*_described(named, function), **own)
    guarded = compiled if patches.calls.guard(compiled, record) else _installing(compiled)
    functools.update_wrapper(guarded, named, updated=())
    guarded.__wrapped__ = function  # type: ignore[attr-defined]
    guarded.__safecompile_original__ = function  # type: ignore[attr-defined]
    return guarded


def _described(named: Any, function: Any) -> tuple[str, str, int]:
    runs = function.func if isinstance(function, functools.partial) else function
    code = getattr(runs, "__code__", None) or getattr(type(runs).__call__, "__code__", None)
    name = named.__qualname__.rpartition("<locals>.")[2]
    return (name, code.co_filename, code.co_firstlineno) if code else (name, "<unknown>", 0)


def _installing(compiled: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap what an unknown torch has returned."""

    @functools.wraps(compiled)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        patches.install()
        return compiled(*args, **kwargs)

    return guarded


_OWN_OPTIONS = ("when_compiling", "recompile_limit")

# Bound now: somebody may put thread_safe_compile in the place of torch.compile.
_torch_compile = torch.compile

# The guarded subclasses of each module class; the same options give the same class, so that replicas share graphs.
_guarded_classes: dict[type, list[tuple[dict[str, Any], type[torch.nn.Module]]]] = {}


def _guarded_class(cls: type[torch.nn.Module], options: dict[str, Any]) -> type[torch.nn.Module]:
    """Return a subclass whose ``forward`` is guarded.

    A subclass and not an attribute of the instance: what copies an instance's ``__dict__`` (``copy``,
    ``deepcopy``, ``DataParallel``) would copy a bound method, and the copy would run the original's weights.
    """
    cls = vars(cls).get("__safecompile_original__", cls)
    known = _guarded_classes.setdefault(cls, [])
    for same, subclass in known:
        if same == options:
            return subclass
    body: dict[str, Any] = {
        "forward": _guard(cls.forward, options),
        "__reduce_ex__": _reduce,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__safecompile_original__": cls,
        "__safecompile_options__": options,
    }
    becomes = getattr(cls, "cls_to_become", None)
    if becomes is not None:  # what a lazy module turns into when it has seen its first input
        body["cls_to_become"] = _guarded_class(becomes, options)
    # The base class is put in afterwards: one that registers its subclasses must not see this one.
    metaclass: Any = type(cls)
    subclass = cast("type[torch.nn.Module]", metaclass(cls.__name__, (torch.nn.Module,), body))
    subclass.__bases__ = (cls,)
    known.append((options, subclass))
    return subclass


def _reduce(self: torch.nn.Module, protocol: Any) -> Any:
    """Copy and pickle an instance by its original class, which pickle can find by name."""
    cls: Any = next(base for base in type(self).__mro__ if "__safecompile_options__" in vars(base))
    make, args, *rest = super(cls, self).__reduce_ex__(protocol)
    if cls is not type(self):  # somebody has put a class on top, and knows how to copy it
        return (make, args, *rest)
    own = vars(cls)
    args = tuple(own["__safecompile_original__"] if arg is cls else arg for arg in args)
    return (functools.partial(_remake, own["__safecompile_options__"], make), args, *rest)


def _remake(options: dict[str, Any], make: Callable[..., Any], *args: Any) -> Any:
    module = make(*args)
    module.__class__ = _guarded_class(type(module), options)
    return module


def _check_options(options: dict[str, Any]) -> None:
    known = [name for name in inspect.signature(_torch_compile).parameters if name != "model"]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise TypeError(
            f"thread_safe_compile() got options that torch.compile in torch {torch.__version__} does not have: "
            f"{', '.join(unknown)}; it has {', '.join(known)}."
        )
    if options.get("backend") == "cudagraphs":
        raise ValueError(
            'thread_safe_compile does not take backend="cudagraphs", whose graphs all threads would share: use '
            'mode="reduce-overhead", with which no two threads share any.'
        )


def _check_callable(fn: Any) -> None:
    problem = _problem_with(fn)
    if problem:
        name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
        raise UnsupportedCallableError(f"thread_safe_compile cannot compile {name}: it {problem}.")


def _problem_with(fn: Any) -> str | None:
    if isinstance(fn, torch.jit.ScriptModule):
        return "is a scripted module; compile the module it was scripted from"
    if hasattr(fn, "_orig_mod"):
        return "is a module that torch.compile has compiled; give the module that it was made from"
    if isinstance(fn, torch.nn.Module):
        if type(fn).forward is torch.nn.Module.forward and "forward" not in vars(fn):
            return "has no forward; give it one, or compile its submodules"
        return _problem_with(fn.forward)
    if isinstance(fn, type):
        return "is a class; decorate its methods, or compile an instance"
    if not callable(fn):
        return "is not callable; give a function, a method or an nn.Module"
    runs = fn if inspect.isroutine(fn) or isinstance(fn, functools.partial) else type(fn).__call__
    if inspect.iscoroutinefunction(runs) or inspect.isasyncgenfunction(runs):
        return "is a coroutine function; compile the plain function that it awaits or runs in a thread"
    if inspect.isgeneratorfunction(runs):
        return "is a generator function; compile the plain function that makes one item"
    return None
