"""Process-wide flags of torch that become each thread's own.

Much of what tracing and compiling keep in module globals describes the *calling thread*: "an FX trace is
going on", "is compiling", the current patcher, the metadata for the next node. ``ThreadGlobals``
moves such names of one module into thread-local storage: the module's own functions are compiled again
from their source with each use of the name redirected, and keep their identity; reads and writes from
outside (``torch.compiler._is_compiling_flag = True``) reach the same storage through properties on the module.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import inspect
import symtable
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

import torch

from safecompile._core.forks import lock_across_forks
from safecompile._patches.point import PatchPoint, threads_running
from safecompile._patches.rewriting import codes_in, constant, functions_of, rewritten, with_constants

# The name in a thread's storage of what it works for: another thread's hold of the lock, and that thread's storage.
EMPLOYER = "employer"


@dataclass(frozen=True)
class Own:
    """A default that is a function of the module's, also while somebody has put another one in its place."""

    name: str


@dataclass(frozen=True)
class Made:
    """A default that is made anew for each thread: an instance of the module's class of this name."""

    by: str


class InModule(Mapping[Any, Any]):
    """A default that is what the name itself holds: a trace that began before has put it there."""

    def __init__(self, module: str, name: str) -> None:
        self._at = (module, name)

    def _held(self) -> Mapping[Any, Any]:
        module, name = self._at
        held: Mapping[Any, Any] = vars(sys.modules[module])[name]
        return held

    def __getitem__(self, key: Any) -> Any:
        return self._held()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._held())

    def __len__(self) -> int:
        return len(self._held())


class ThreadGlobals(PatchPoint):
    """Makes names of one module thread-local."""

    def __init__(self, name: str, module: str, defaults: dict[str, Any], protects: str) -> None:
        """``defaults`` maps each name to the value it has while nothing is traced or compiled."""
        super().__init__()
        self.name, self.protects, self.upstream = name, protects, f"{module}: {', '.join(defaults)}"
        self.module = module
        self._defaults = defaults
        self._changed: Callable[[CodeType], CodeType] | None = None

    def needed(self) -> bool:
        # A name that is gone was repaired upstream or not there yet; either way there is nothing to isolate.
        return bool(self._present())

    def mismatch(self) -> str | None:
        if self._changed is not None:
            return None
        shadowed = _shadowed(symtable.symtable(self._source(), self.module, "exec"), self._present())
        return f"{self.module} uses {shadowed} for something local" if shadowed else None

    def apply(self) -> None:
        module = importlib.import_module(self.module)
        names = self._present()
        local, count = _local_storage(module, {name: _default(module, self._defaults[name]) for name in names})
        values = {"local": local, "set": count, "seen": _Seen(local)}
        self._changed = self._changed or rewritten(module, names, _Redirect(self._defaults))
        for function in functions_of(module):
            if any(name in code.co_names for code in codes_in(function.__code__) for name in names):
                self.recode(function, with_constants(self._changed(function.__code__), **values))
        self._carried = torch._C._len_torch_dispatch_stack() > 0
        if self._carried:
            # The calling thread is inside a mode that it entered before.
            for name in names:
                setattr(local, name, vars(module)[name])
        self.local = local
        self.replace(module, "__class__", _module_class(module, names, local))

    def restore(self) -> None:
        if self.active:
            module = importlib.import_module(self.module)
            inside = threading.get_ident() in threads_running(self.replaced_code())
            super().restore()
            values = {name: getattr(self.local, name) for name in self._present()} if self._carried else self._defaults
            if not inside:
                # What began before the installation and ended after it has left its flags behind.
                flags = {name: value for name, value in values.items() if value is None or isinstance(value, bool)}
                vars(module).update({name: flags[name] for name in self._present() if name in flags})

    def _present(self) -> tuple[str, ...]:
        module = importlib.import_module(self.module)
        return tuple(name for name in self._defaults if name in vars(module))

    def _source(self) -> str:
        return inspect.getsource(importlib.import_module(self.module))


class _Redirect(ast.NodeTransformer):
    """Turns each use of a name inside a function into an attribute of the thread-local storage."""

    def __init__(self, defaults: dict[str, Any]) -> None:
        self._defaults = self._names = defaults
        self._inside: list[str] = []

    def _function(self, node: Any) -> Any:
        self._inside.append(getattr(node, "name", ""))
        self.generic_visit(node)
        self._inside.pop()
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _function  # noqa: N815  ast's names

    def visit_Global(self, node: ast.Global) -> ast.stmt:
        rest = [name for name in node.names if name not in self._names]
        return ast.copy_location(ast.Global(rest) if rest else ast.Pass(), node)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if not self._inside or node.id not in self._names:
            return node
        at = functools.partial(ast.copy_location, old_node=node)
        storage = "seen" if self._inside[-1].startswith("is_") else "local"
        own: ast.expr = at(ast.Attribute(at(ast.Constant(constant(storage))), node.id, node.ctx))
        default = self._defaults[node.id]
        if isinstance(node.ctx, ast.Load) and (default is None or default is False):
            # Warm calls read some flags several times, and thread-local storage takes 50 ns where this takes 5.
            count = at(ast.Attribute(at(ast.Constant(constant("set"))), node.id, ast.Load()))
            own = at(ast.IfExp(count, own, at(ast.Constant(default))))
        return own


def _default(module: ModuleType, value: Any) -> Any:
    if isinstance(value, Own):
        return next(function for function in functions_of(module) if function.__name__ == value.name)
    return value


def _shadowed(scope: symtable.SymbolTable, names: tuple[str, ...]) -> str | None:
    """Return a name that some function binds for itself, as a parameter or by assigning without ``global``."""
    if scope.get_type() == "function":
        for name in set(names).intersection(scope.get_identifiers()):
            if not scope.lookup(name).is_global():
                return name
    return next(filter(None, (_shadowed(child, names) for child in scope.get_children())), None)


# Guards all counts of threads that have set a name.
_guard = lock_across_forks()


class _Seen:
    """What a question such as ``is_compiling()`` is answered with: in a helper thread, what its employer does counts."""

    def __init__(self, local: Any) -> None:
        self._local = local

    def __getattr__(self, name: str) -> Any:
        own = vars(self._local)
        hold, values = own.get(EMPLOYER) or (None, own)
        return (values if hold is not None and hold.depth and not own[name] else own)[name]


def _local_storage(module: ModuleType, defaults: dict[str, Any]) -> tuple[Any, Any]:
    """Return the storage, and for each name how many threads have set it to something else than its default."""
    count = type("Counts", (), {"__slots__": tuple(defaults)})()  # which CPython reads soonest
    for counted in defaults:
        setattr(count, counted, 0)

    def is_set(name: str, value: Any) -> bool:
        return value is not defaults[name]

    class Local(threading.local):
        def __init__(self) -> None:
            # The defaults and not the module's present values: a trace may be going on elsewhere right now.
            for name, value in defaults.items():
                made = vars(module)[value.by]() if isinstance(value, Made) else copy.copy(value)
                super().__setattr__(name, made)

        def __setattr__(self, name: str, value: Any) -> None:
            with _guard:
                setattr(count, name, getattr(count, name) + is_set(name, value) - is_set(name, getattr(self, name)))
            super().__setattr__(name, value)

    return Local(), count


def _module_class(module: ModuleType, names: tuple[str, ...], local: Any) -> type[ModuleType]:
    def redirect(name: str) -> property:
        return property(lambda _: getattr(local, name), lambda _, value: setattr(local, name, value))

    return type("ModuleWithThreadGlobals", (type(module),), {name: redirect(name) for name in names})
