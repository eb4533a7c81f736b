from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

import safecompile
from tests.helpers.subprocess_run import run_forked, run_isolated

if TYPE_CHECKING:
    from collections.abc import Iterator

MODULES = {"observe"}
FUNCTIONS = {
    "capture_context",
    "checkpoint",
    "checkpoint_sequential",
    "fx_trace_lock",
    "install",
    "reset",
    "statistics",
    "thread_safe_compile",
    "uninstall",
    "warmup",
}


def public_modules() -> Iterator[str]:
    yield "safecompile"
    for info in pkgutil.walk_packages(safecompile.__path__, "safecompile."):
        if not any(part.startswith("_") for part in info.name.split(".")):
            yield info.name


def test_the_package_offers_these_names_and_errors_only() -> None:
    names = {name for name in safecompile.__all__ if not isinstance(getattr(safecompile, name), ModuleType)}
    assert names >= FUNCTIONS
    others = {name: getattr(safecompile, name) for name in names - FUNCTIONS - MODULES}
    no_errors = [
        name for name, value in others.items() if not (inspect.isclass(value) and issubclass(value, Exception))
    ]
    assert no_errors == []


def test_one_except_clause_catches_every_error() -> None:
    errors = [value for name in safecompile.__all__ if inspect.isclass(value := getattr(safecompile, name))]
    errors = [error for error in errors if not issubclass(error, Warning)]
    roots = [error for error in errors if all(issubclass(other, error) for other in errors)]
    assert len(roots) == 1, f"no error class is a base of all of {errors}"


@pytest.mark.parametrize("name", list(public_modules()))
def test_all_is_complete(name: str) -> None:
    module = importlib.import_module(name)
    # What a module imports is no part of it; what the package imports from its own modules is.
    public = {
        attribute
        for attribute, value in vars(module).items()
        if not attribute.startswith("_")
        and not isinstance(value, ModuleType)
        and getattr(value, "__module__", name).startswith(name)
    }
    assert public <= set(module.__all__)
    assert all(hasattr(module, attribute) for attribute in module.__all__)
    assert len(module.__all__) == len(set(module.__all__))


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_every_public_name_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(safecompile, name))


def test_import_loads_no_dynamo_and_changes_nothing_in_torch() -> None:
    run_isolated(
        """
        from __future__ import annotations
        import sys
        import torch
        import torch.fx, torch.utils.checkpoint
        from tests.helpers.torch_state import changes, snapshot

        def compilers() -> set[str]:
            return {name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor"))}

        loaded_by_torch = compilers()
        before = snapshot()
        import safecompile
        assert compilers() == loaded_by_torch, sorted(compilers() - loaded_by_torch)
        if torch.__version__.startswith("2.13"):
            assert "torch._dynamo" not in sys.modules
        changed = changes(before, snapshot())
        assert not changed, changed

        torch.compile(lambda x: x)  # loads the compiler, and that changes torch by itself
        before = snapshot()

        @safecompile.thread_safe_compile
        def f(x: torch.Tensor) -> torch.Tensor:
            return x + 1

        assert not (changed := changes(before, snapshot())), f"decorating changed {changed}"
        """
    ).check()


def test_the_comparison_sees_a_patch() -> None:
    result = run_forked(
        """
        import torch.fx
        from tests.helpers.torch_state import changes, snapshot

        before = snapshot()
        assert changes(before, snapshot()) == []
        torch.fx.Tracer.trace = lambda self, root: None
        torch.fx.symbolic_trace.__code__ = (lambda root, concrete_args=None: None).__code__
        torch.a_new_name = 1
        print(*changes(before, snapshot()))
        """
    ).check()
    assert {"torch.a_new_name", "torch.fx._symbolic_trace.Tracer.trace", "torch.fx.symbolic_trace.__code__"} <= set(
        result.stdout.split()
    )
