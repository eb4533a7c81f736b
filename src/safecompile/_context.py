"""``capture_context``: what a worker thread does not get from the thread that starts it."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch

from safecompile._core.errors import ContextConflictError, UnsupportedCallableError
from safecompile._core.forks import lock_across_forks
from safecompile._patches.config import apply_config, capture_config

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["ThreadContext", "capture_context"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def capture_context() -> ThreadContext:
    """Capture the calling thread's settings, to be carried to workers.

    Captured are grad and inference mode, autocast, default device and dtype, the accelerator's current
    device and stream, the number of intra-op threads, and the Dynamo, AOTAutograd and Inductor
    configuration. Each of these belongs to a thread and changes results, or makes a worker compile a variant of its
    own. The configuration does so from torch 2.12 on: before, it is the process's, and left alone. The default dtype is
    the process's on every torch.

    Because the default dtype is the process's, entering is refused while another thread is inside a context with
    another one. What is captured holds in the worker's backwards and in the recomputation of its checkpointed regions
    as well, whichever thread runs them: a backward that is compiled when it is first used, and a region's
    recomputation, have the configuration of their forward.

    Use the result in a worker as ``with context:``, or by what starts the worker::

        threading.Thread(target=context.run, args=(function, x))
        ThreadPoolExecutor(initializer=context.apply)
        await asyncio.to_thread(context.run, function, x)
        await anyio.to_thread.run_sync(context.run, function, x)

        @app.get("/")  # FastAPI and Starlette run plain functions in a pool of their own
        @context.wrap
        def endpoint(): ...
    """
    return ThreadContext()


class _DefaultDtype:
    """The default dtype, which is the process's own, and the threads inside contexts."""

    def __init__(self) -> None:
        self._guard = lock_across_forks()
        # Guarded by _guard: the dtypes of the blocks each thread is in, and the dtype outside of all blocks.
        self._blocks: dict[int, list[torch.dtype]] = {}
        self._outside = torch.float32

    @contextmanager
    def set(self, dtype: torch.dtype) -> Iterator[None]:
        """Set it, unless another thread is inside another one."""
        me = threading.get_ident()
        with self._guard:
            # All of a thread's blocks count: from the inner ones it goes back to the outer ones.
            others = {other for thread, dtypes in self._blocks.items() if thread != me for other in dtypes} - {dtype}
            if others:
                raise ContextConflictError(
                    f"cannot enter a context with the default dtype {dtype}: it belongs to the whole process, and "
                    f"another thread is inside a context with {others.pop()}. Let both use one default dtype, and "
                    "give others explicitly."
                )
            if not self._blocks:
                self._outside = torch.get_default_dtype()
            self._blocks.setdefault(me, []).append(dtype)
            self._put(dtype)
        try:
            yield
        finally:
            with self._guard:
                mine = self._blocks[me]
                mine.pop()
                if not mine:
                    del self._blocks[me]
                if mine or not self._blocks:
                    self._put(mine[-1] if mine else self._outside)

    def _put(self, dtype: torch.dtype) -> None:
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)


_applied = threading.local()
_default_dtype = _DefaultDtype()


class ThreadContext:
    """The settings of the thread that made it. Any number of threads may use it at the same time."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = {device: _autocast(device) for device in _device_types()}
        self._autocast_cache = torch.is_autocast_cache_enabled()
        self._default_device = _default_device()
        self._default_dtype = torch.get_default_dtype()
        self._stream = torch.accelerator.current_stream() if _accelerator_in_use() else None
        self._threads = torch.get_num_threads()
        self._config = capture_config()
        self._entered = threading.local()

    def __enter__(self) -> ThreadContext:  # noqa: PYI034  Self is newer than Python 3.10
        with ExitStack() as undo:
            self._set(undo)
            self._stack().append(undo.pop_all())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack().pop().close()

    def run(self, function: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Call ``function`` with the captured settings, and put the calling thread's own back."""
        with self:
            return function(*args, **kwargs)

    def wrap(self, function: Callable[_P, _R], /) -> Callable[_P, _R]:
        """Return a function that runs each call of ``function`` with the captured settings: a decorator.

        Raises:
            UnsupportedCallableError: ``function`` is no function, method or other plain callable, or is a coroutine or
                generator function, whose body runs after the call has returned.
        """
        name = getattr(function, "__qualname__", None) or type(function).__qualname__
        if isinstance(function, (type, staticmethod, classmethod)) or not callable(function):
            raise UnsupportedCallableError(
                f"wrap cannot decorate {name}: give a function, below @staticmethod and such."
            )
        runs = function if inspect.isroutine(function) else type(function).__call__
        kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
        if any(is_kind(one) for is_kind in kinds for one in (function, runs)):
            raise UnsupportedCallableError(
                f"wrap cannot decorate {name}: the body of a coroutine or generator function runs after its call has "
                "returned. Wrap the plain function that it calls or runs in a thread."
            )

        @functools.wraps(function)
        def in_context(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with self:
                return function(*args, **kwargs)

        return in_context

    def apply(self) -> None:
        """Set the captured settings on the calling thread for good: an ``initializer`` for thread pools.

        Autocast then goes without its cache of weights in a lower dtype, which is emptied only where autocast ends:
        weights that change meanwhile would be used as they were.
        """
        with ExitStack() as undo:
            self._set(undo, for_good=True)
            # Kept for as long as the thread lives, and by the thread: inference mode ends, for the thread that does
            # it, when its object is collected.
            _applied.undo = [*getattr(_applied, "undo", []), undo.pop_all()]

    def _stack(self) -> list[ExitStack]:
        stack: list[ExitStack] | None = getattr(self._entered, "stack", None)
        if stack is None:
            stack = self._entered.stack = []
        return stack

    def _set(self, undo: ExitStack, *, for_good: bool = False) -> None:
        """Set what differs from the calling thread's settings: some settings cost time merely by being set."""
        undo.callback(apply_config(self._config))
        if torch.get_num_threads() != self._threads:
            undo.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(self._threads)
        undo.enter_context(_default_dtype.set(self._default_dtype))
        if _default_device() != self._default_device:
            undo.enter_context(self._default_device)
        if self._stream is not None:
            undo.callback(torch.accelerator.set_stream, torch.accelerator.current_stream())
            undo.callback(torch.accelerator.set_device_index, torch.accelerator.current_device_index())
            torch.accelerator.set_stream(self._stream)
        if torch.is_inference_mode_enabled() != self._inference:
            undo.enter_context(torch.inference_mode(self._inference))
        autocasts = any(enabled for enabled, _ in self._autocast.values())
        cache = self._autocast_cache and not (autocasts and for_good)
        for device, (enabled, dtype) in self._autocast.items():
            if (*_autocast(device), torch.is_autocast_cache_enabled()) != (enabled, dtype, cache):
                undo.enter_context(torch.autocast(device, dtype, enabled, cache))
        # Last, for inference mode sets it as well.
        if torch.is_grad_enabled() != self._grad:
            undo.enter_context(torch.set_grad_enabled(self._grad))


def _default_device() -> torch.device:
    # Not torch.get_default_device(), which raises in torch 2.8 once set_default_device(None) was called.
    return torch.empty(0).device


def _device_types() -> list[str]:
    # torch 2.6 raises where there is none.
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu", *([accelerator.type] if accelerator else [])]


def _accelerator_in_use() -> bool:
    # Asking for the current device would otherwise start the accelerator in a process that has not used it.
    return torch.accelerator.is_available() and (not torch.cuda.is_available() or torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _autocast(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
