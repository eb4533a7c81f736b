"""Compiled autograd: torch has one compiler of backwards for the whole process, so one thread at a time may use it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from safecompile._core.errors import ContextConflictError
from safecompile._core.forks import lock_across_forks
from safecompile._patches.point import PatchPoint
from safecompile._patches.rewriting import copy_of, redirecting


class CompiledAutograd(PatchPoint):
    name = "compiled-autograd"
    protects = "backwards of other threads are compiled, fail, or stay compiled for good (E10; pytorch#135298)"
    upstream = "torch/_dynamo/compiled_autograd.py, _enable and _disable"
    relies_on = ("torch._dynamo.compiled_autograd:_enable", "torch.autograd.graph:_engine_run_backward")

    def __init__(self) -> None:
        super().__init__()
        # Guards who has enabled it, how often, and what a backward runs.
        self._guard = lock_across_forks()
        self._owner: threading.Thread | None = None
        self._depth = 0

    def apply(self) -> None:
        from torch._dynamo import compiled_autograd
        from torch.autograd import graph

        self._backward: Any = graph._engine_run_backward
        self._code = self._backward.__code__
        run = copy_of(self._backward)

        def run_or_refuse(*args: Any, **kwargs: Any) -> Any:
            self._check("cannot run a backward")
            return run(*args, **kwargs)

        self._refusing = redirecting(run_or_refuse)
        self.wrap(compiled_autograd, "_enable", self._enable)
        self.wrap(compiled_autograd, "_disable", self._disable)

    def restore(self) -> None:
        if self.active and self._backward.__code__ is self._refusing:
            self._backward.__code__ = self._code
        super().restore()

    def after_fork(self) -> None:
        from torch._dynamo import compiled_autograd

        owner = self._owner
        if owner is not None and owner.ident != threading.get_ident():
            self._owner, self._depth = None, 0
            self._backward.__code__ = self._code
            compiled_autograd.reset()

    def _check(self, what: str) -> None:
        owner = self._owner
        if owner is not None and owner.ident != threading.get_ident():
            raise ContextConflictError(
                f"{what} in thread {threading.current_thread().name!r}: thread {owner.name!r} has enabled compiled "
                "autograd, which torch has once for all threads of the process; let one thread at a time use it, and the "
                "others call backward before or after that."
            )

    def _enable(self, enable: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> AbstractContextManager[None]:
        return self._enabled(enable(*args, **kwargs))

    @contextmanager
    def _enabled(self, context: AbstractContextManager[None]) -> Iterator[None]:
        with self._guard:
            self._check("cannot enable compiled autograd")
            self._owner, self._depth = threading.current_thread(), self._depth + 1
            self._backward.__code__ = self._refusing
        try:
            with context:
                yield
        finally:
            with self._guard:
                self._depth -= 1
                if not self._depth:
                    self._owner = None
                    self._backward.__code__ = self._code

    def _disable(self, disable: Callable[[], Any], _: Any, args: Any, kwargs: Any) -> AbstractContextManager[None]:
        owner = self._owner
        mine = owner is not None and owner.ident == threading.get_ident()
        return disable(*args, **kwargs) if mine else _nothing_to_disable()


@contextmanager
def _nothing_to_disable() -> Iterator[None]:
    """Do what torch's own ``_disable`` does, but leave alone the compiler, which is another thread's."""
    from torch._dynamo import compiled_autograd

    if not hasattr(compiled_autograd, "active_disable_ctx"):  # torch 2.6
        yield
        return
    before, compiled_autograd.active_disable_ctx = compiled_autograd.active_disable_ctx, True
    try:
        yield
    finally:
        compiled_autograd.active_disable_ctx = before
