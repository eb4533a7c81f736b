"""Functions of torch compiled again from their source with something changed in it."""

from __future__ import annotations

import ast
import gc
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Any


def rewritten(module: ModuleType, names: Sequence[str], change: ast.NodeTransformer) -> Callable[[CodeType], CodeType]:
    """Apply ``change`` to the top-level statements of a module in which one of ``names`` stands.

    Returns:
        a function that finds the changed code by the code it replaces.
    """
    source = inspect.getsource(module)
    lines = source.splitlines()
    tree = ast.parse(source)
    tree.body = [
        change.visit(node)
        for node in tree.body
        if (isinstance(node, ast.ImportFrom) and node.module == "__future__")
        or any(name in line for line in lines[node.lineno - 1 : node.end_lineno] for name in names)
    ]
    compiled = compile(tree, str(module.__file__), "exec", dont_inherit=True)
    found = {_key(code): code for code in codes_in(compiled)}
    return lambda code: found[_key(code)]


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Return ``code`` and the code of what is defined in it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from codes_in(value)


def parsed(source: str, at: ast.stmt) -> list[ast.stmt]:
    """Return the statements of ``source`` as if they stood in the line of ``at``."""
    tree = ast.parse(source)
    for part in map(vars, ast.walk(tree)):
        if "lineno" in part:
            part["lineno"] = part["end_lineno"] = at.lineno
    return tree.body


def functions_of(module: ModuleType) -> list[FunctionType]:
    """Return every live function of the module, also undecorated ones that only a decorator holds."""
    if module.__name__ in _found:
        return _found[module.__name__]
    return [thing for thing in gc.get_referrers(vars(module)) if type(thing) is FunctionType]


@contextmanager
def looked_up(modules: Iterable[ModuleType]) -> Iterator[None]:
    """Go through all objects of the process once, and not for each module."""
    modules = list(modules)
    functions = [thing for thing in gc.get_referrers(*map(vars, modules)) if type(thing) is FunctionType]
    for module in modules:
        _found[module.__name__] = [f for f in functions if f.__globals__ is vars(module)]
    try:
        yield
    finally:
        _found.clear()


_found: dict[str, list[FunctionType]] = {}


def _key(code: CodeType) -> tuple[str, int]:
    return code.co_name, code.co_firstlineno


def constant(name: str) -> str:
    """Return the text that stands in code for the object ``name`` until ``with_constants`` puts it in."""
    return f"<safecompile constant {name}>"


def with_constants(code: CodeType, **objects: Any) -> CodeType:
    """Return ``code`` with objects in the place of ``constant`` texts.

    In this way a function of torch reaches our objects without a name being added to torch's modules.
    """
    marks = {constant(name): value for name, value in objects.items()}

    def put(value: Any) -> Any:
        if isinstance(value, str) and value in marks:
            return marks[value]
        return with_constants(value, **objects) if isinstance(value, CodeType) else value

    return code.replace(co_consts=tuple(put(value) for value in code.co_consts))


class Instead(ast.NodeTransformer):
    """Looks up an attribute of an object of ours where code has one of torch's with this text, ``owner.name``."""

    def __init__(self, text: str, name: str) -> None:
        """``name`` is the object's, as for ``constant``."""
        self._text, self._name = text, name

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if ast.unparse(node) == self._text:
            node.value = ast.copy_location(ast.Constant(constant(self._name)), node)
        else:
            self.generic_visit(node)
        return node


def redirecting(target: Callable[..., Any], *, generator: bool = False) -> CodeType:
    """Return code that calls ``target`` with all its arguments, for a function that is to stay the same object.

    A ``generator`` function keeps code of its kind: from Python 3.13 on another kind is deprecated.
    """
    return with_constants((_redirect_generator if generator else _redirect).__code__, target=target)


def _redirect(*args: Any, **kwargs: Any) -> Any:
    return "<safecompile constant target>".__call__(*args, **kwargs)  # type: ignore[operator]


def _redirect_generator(*args: Any, **kwargs: Any) -> Any:
    return (yield from "<safecompile constant target>".__call__(*args, **kwargs))  # type: ignore[operator]


def copy_of(function: Any) -> Any:
    """Return a function with the code that ``function`` has now."""
    if not isinstance(function, FunctionType):
        return function
    copied = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__, copied.__doc__ = function.__kwdefaults__, function.__doc__
    copied.__qualname__, copied.__annotations__ = function.__qualname__, function.__annotations__
    copied.__dict__.update(function.__dict__)
    return copied
