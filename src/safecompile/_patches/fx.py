"""FX symbolic tracing: the patches it makes stay out of other threads.

A trace replaces ``nn.Module.__call__`` and ``__getattr__`` on the class, and functions such as ``math.sqrt``
where they are looked up. Here each thread keeps its replacements on a stack of its own, reached through a
dispatcher that is in place only while some thread traces. The patched function keeps its identity: a
compile in another thread would otherwise see, guard on, and fail over, what the trace has put there.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import inspect
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType, ModuleType
from typing import Any, cast

import torch

from safecompile._core.forks import lock_across_forks
from safecompile._patches.point import PatchPoint, threads_running
from safecompile._patches.rewriting import copy_of, redirecting

_ABSENT = cast("Any", object())
_Key = tuple[int, str]


class _Stacks(threading.local):
    """The calling thread's replacements, the innermost last."""

    def __init__(self) -> None:
        self.of: dict[_Key, list[Any]] = {}


class _Dispatcher:
    """Calls the replacement that the calling thread's own trace has made, else the original."""

    def __init__(self, stacks: _Stacks, key: _Key, original: Any) -> None:
        self._stacks, self._key, self._original = stacks, key, original

    def current(self) -> Any:
        stack = self._stacks.of.get(self._key)
        return stack[-1] if stack else self._original

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self.current()(*args, **kwargs)

    def call_once(self, *args: Any, **kwargs: Any) -> Any:
        """Call the replacement such that it goes on to the original where it looks the method up again."""
        stack = self._stacks.of.get(self._key)
        if not stack:
            return self._original(*args, **kwargs)
        replacement = stack.pop()
        try:
            return replacement(*args, **kwargs)
        finally:
            stack.append(replacement)


class _ModuleDispatcher(_Dispatcher):
    """The same for a function of a module, whose original somebody may replace meanwhile."""

    def current(self) -> Any:
        stack = self._stacks.of.get(self._key)
        return stack[-1] if stack else vars(self._original)[self._key[1]]


class _Change:
    """One replacement, in the form in which FX's patcher keeps them."""

    def __init__(self, point: FXPatches, owner: Any, name: str, new_fn: Any) -> None:
        self.owner, self.name, self.new_fn, self._point = owner, name, new_fn, point
        self.key = (id(owner), name)

    def patch(self) -> None:
        self._point.enter(self)

    def revert(self) -> None:
        self._point.leave(self)


class FXPatches(PatchPoint):
    name = "fx-patches"
    protects = (
        "eager modules called beside an FX trace return Proxy objects, fail, or stay patched for good; a trace that "
        "ends takes away what another still needs (S4, S5, P1, E2, E3)"
    )
    upstream = "pytorch#112775; torch/fx/_symbolic_trace.py, _Patcher"
    relies_on = tuple(
        f"torch.fx._symbolic_trace:{name}"
        for name in ("_Patcher", "_autowrap_check", "_create_wrapped_func", "_orig_module_call", "_orig_module_getattr")
    )

    def __init__(self, skip_frames_of: Callable[[CodeType], None]) -> None:
        """``skip_frames_of`` keeps Dynamo from compiling the dispatcher in threads that are inside compiled code."""
        super().__init__()
        self._skip_frames_of = skip_frames_of
        self._stacks = _Stacks()
        # Never held while code that is not ours runs. Guards _places: how many traces want a replacement, and
        # what takes it out.
        self._guard = lock_across_forks()
        self._places: dict[_Key, tuple[int, Callable[[], None]]] = {}
        self._classes: dict[tuple[ModuleType, type], type] = {}

    # From torch 2.14 on nothing in `trace` itself is replaced; still no patches may come or go in the middle of one.
    def replaced_code(self) -> set[CodeType]:
        return super().replaced_code() | _trace_code()

    def replacing_code(self) -> set[CodeType]:
        return super().replacing_code() | _trace_code()

    def began_before(self) -> bool:
        """Tell whether the calling thread is inside a trace that does not know of the patches."""
        return not self.active and threading.get_ident() in threads_running(_trace_code())

    def apply(self) -> None:
        from torch.fx import _symbolic_trace as fx

        self._wrap_function = fx._create_wrapped_func
        self._wrapped_code = fx._create_wrapped_func(len).__code__
        self.wrap(fx._Patcher, "patch", self._add)
        self.wrap(fx._Patcher, "patch_method", self._add)
        self.wrap(fx, "_autowrap_check", lambda _, __, args, kwargs: self._autowrap(*args, **kwargs))
        self.wrap(fx.Tracer, "trace", _trace_on_one_thread)
        for code in (_Dispatcher.call, _Dispatcher.call_once, _Dispatcher.current):
            self._skip_frames_of(code.__code__)
        # A trace that began before the installation may have its own function in the place of these.
        self._originals = {"__call__": fx._orig_module_call, "__getattr__": fx._orig_module_getattr}
        # The tracer's own wrappers go on to the originals by these names.
        self.replace(fx, "_orig_module_call", copy_of(fx._orig_module_call))
        self.replace(fx, "_orig_module_getattr", copy_of(fx._orig_module_getattr))

    def _add(self, original: Any, patcher: Any, args: Any, kwargs: Any) -> None:
        def add(owner: Any, name: str, new_fn: Any, deduplicate: bool = True) -> None:
            change = _Change(self, owner, name, new_fn)
            if not (deduplicate and any(getattr(made, "key", None) == change.key for made in patcher.patches_made)):
                change.patch()
                patcher.patches_made.append(change)

        add(*args, **{"owner" if k in ("cls", "frame_dict") else k: v for k, v in kwargs.items()})

    def _autowrap(self, patcher: Any, frame_dict: dict[str, Any], function_ids: set[int]) -> None:
        if not patcher.visit_once(frame_dict):
            return
        for name, value in list(frame_dict.items()):  # a copy: another thread's trace may add a name
            original = value
            if getattr(value, "__code__", None) is self._wrapped_code:
                original = value.__wrapped__  # another thread's replacement
            if not name.startswith("_") and callable(original) and id(original) in function_ids:
                patcher.patch(frame_dict, name, self._wrap_function(original))

    @contextmanager
    def replaced(self, replacements: list[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
        """Replace functions in the globals of modules, as a trace does."""
        with ExitStack() as undo:
            for owner, name, new_fn in replacements:
                change = _Change(self, owner, name, new_fn)
                change.patch()
                undo.callback(change.revert)
            yield

    def enter(self, change: _Change) -> None:
        with self._guard:
            count, undo = self._places.get(change.key) or (0, self._install(change))
            self._places[change.key] = (count + 1, undo)
            self._stacks.of.setdefault(change.key, []).append(change.new_fn)

    def leave(self, change: _Change) -> None:
        with self._guard:
            stack = self._stacks.of[change.key]
            del stack[len(stack) - 1 - stack[::-1].index(change.new_fn)]
            count, undo = self._places.pop(change.key)
            if count > 1:
                self._places[change.key] = (count - 1, undo)
            else:
                undo()

    def _install(self, change: _Change) -> Callable[[], None]:
        """Put a replacement in place; return what takes it out again."""
        if not isinstance(change.owner, dict):
            return self._install_method(change.owner, change.name, change.key)
        module = sys.modules.get(change.owner.get("__name__", ""))
        # The names of builtins are looked up in their dict, too.
        own = isinstance(module, ModuleType) and vars(module) is change.owner and module is not builtins
        if own and _has_no_python_code(cast("ModuleType", module)):
            return self._install_property(cast("ModuleType", module), change.name, change.key)
        return self._install_global(change.owner, change)

    def _install_method(self, cls: type, name: str, key: _Key) -> Callable[[], None]:
        if cls is torch.nn.Module and name in self._originals:
            method = self._originals[name]
            code = method.__code__
            redirect = redirecting(_Dispatcher(self._stacks, key, copy_of(method)).call)
            self._skip_frames_of(redirect)  # before another thread can call it
            method.__code__ = redirect
            return lambda: setattr(method, "__code__", code)
        stored = vars(cls).get(name, _ABSENT)
        call = _Dispatcher(self._stacks, key, getattr(cls, name)).call_once

        def dispatch(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        self._skip_frames_of(dispatch.__code__)
        setattr(cls, name, dispatch)
        return lambda: delattr(cls, name) if stored is _ABSENT else setattr(cls, name, stored)

    def _install_property(self, module: ModuleType, name: str, key: _Key) -> Callable[[], None]:
        """Replace a function of ``math`` and the like, which is reached only as an attribute of its module."""
        if not isinstance(module, _PatchedModule):
            # Kept: Dynamo cannot finish a guard on the module whose class has gone meanwhile.
            bases = (_PatchedModule, type(module))
            made = self._classes.setdefault((module, bases[1]), type("_PatchedModule", bases, {}))
            module.__class__ = made
        cls = type(module)
        current = _ModuleDispatcher(self._stacks, key, module).current
        # It can be set as before, for those who patch it for the process.
        setattr(cls, name, property(lambda _: current(), lambda _, value: vars(module).update({name: value})))

        def undo() -> None:
            delattr(cls, name)
            if not any(isinstance(value, property) for value in vars(cls).values()):
                module.__class__ = cls.__bases__[1]

        return undo

    def _install_global(self, frame_dict: dict[str, Any], change: _Change) -> Callable[[], None]:
        """Replace a name that functions look up in their globals: for all threads, as there is no other way.

        The replacement looks for proxies in its arguments and passes everything else through, so that it may
        serve other threads and traces, too.
        """
        name, stored = change.name, frame_dict.get(change.name, _ABSENT)
        new_fn = change.new_fn
        if getattr(new_fn, "__code__", None) is self._wrapped_code:
            # It may have been made around another trace's replacement, which has gone since.
            new_fn = self._wrap_function(getattr(builtins, name) if stored is _ABSENT else stored)
        frame_dict[name] = new_fn
        return lambda: frame_dict.pop(name, None) if stored is _ABSENT else frame_dict.update({name: stored})


class LazyGraphModules(PatchPoint):
    name = "lazy-graph-code"
    protects = "threads that call a compiled graph first make its code at the same time: NameError (E4)"
    upstream = "torch/fx/_lazy_graph_module.py, real_recompile"
    relies_on = ("torch.fx._lazy_graph_module:_LazyGraphModule.real_recompile",)

    def __init__(self) -> None:
        super().__init__()
        # Held while Python code is made of a graph, which calls nothing of the user's and compiles nothing.
        self._making = lock_across_forks()

    def apply(self) -> None:
        from torch.fx import _lazy_graph_module as lazy

        self.wrap(lazy._LazyGraphModule, "real_recompile", self._make)

    def _make(self, make: Callable[[], None], module: Any, _: Any, __: Any) -> None:
        if module._needs_recompile():
            with self._making:
                make()  # looks again


def _trace_code() -> set[CodeType]:
    return {inspect.unwrap(cast("Any", torch.fx.Tracer.trace)).__code__}


def _trace_on_one_thread(trace: Callable[..., Any], tracer: Any, args: Any, kwargs: Any) -> Any:
    """Run a backward inside the trace on the tracing thread, which has the trace's state, and not on a device's."""
    tracer._qualname_counter = defaultdict(int)  # torch has one for all tracers of the process
    with torch.autograd.set_multithreading_enabled(False):
        return trace(*args, **kwargs)


class _PatchedModule(ModuleType):
    pass


def _has_no_python_code(module: ModuleType) -> bool:
    loader = getattr(module.__spec__, "loader", None)
    return loader is importlib.machinery.BuiltinImporter or isinstance(loader, importlib.machinery.ExtensionFileLoader)
