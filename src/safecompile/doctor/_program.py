"""What the doctor's programs are made of: their description, how they end, and threads, traces and backends that stop."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar

import torch

__all__ = [
    "SECONDS",
    "Case",
    "CountingBackend",
    "FaultError",
    "HangError",
    "NotApplicableError",
    "Program",
    "Stops",
    "attempt",
    "await_",
    "company",
    "elsewhere",
    "example",
    "fault",
    "first_line",
    "fresh",
    "in_the_middle_of",
    "inside_elsewhere",
    "names",
    "program",
    "repeat",
    "together",
]

_T = TypeVar("_T")

SECONDS = 30.0
"""How long a program waits for what happens at once when all is well."""


class FaultError(Exception):
    """The hazard was seen; the text says how."""


class HangError(Exception):
    """The hazard was seen, and it is that something never ends."""


class NotApplicableError(Exception):
    """This machine or this torch cannot have the hazard; the text says why."""


class Case:
    """One run of a program: what it calls where it would call torch."""

    def __init__(self, *, library: bool) -> None:
        """``library``: with safecompile, as its documentation says, or with torch alone."""
        self.library = library
        # A wait that never ends is known as such after this time; one that ends must not be taken for it.
        self.patience = SECONDS if library else 3.0

    def compile(self, function: Any, **options: Any) -> Any:
        """Compile with ``thread_safe_compile``, or with ``torch.compile``."""
        if self.library:
            from safecompile import thread_safe_compile

            return thread_safe_compile(function, **options)
        return torch.compile(function, **options)

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """Make a region that is not reentrant, with ``safecompile.checkpoint``, or with torch's."""
        if self.library:
            from safecompile import checkpoint

            return checkpoint(function, *args)
        from torch.utils.checkpoint import checkpoint as torch_checkpoint

        return torch_checkpoint(function, *args, use_reentrant=False)

    def reset(self) -> None:
        """Forget all that is compiled."""
        if self.library:
            from safecompile import reset

            reset()
        else:
            torch.compiler.reset()

    def carry(self) -> Callable[..., Any]:
        """Return what calls a function in a worker: under the calling thread's ``capture_context``, or plainly."""
        if self.library:
            from safecompile import capture_context

            return capture_context().run
        return lambda function, *args: function(*args)


@dataclass(frozen=True)
class Program:
    """One hazard, and the function that tries to meet it."""

    id: str
    title: str
    """What a user sees."""
    kind: Literal["silent", "broken for good", "crash", "hang", "error", "slow"]
    run: Callable[[Case], str | None]
    """Returns how often it was healthy, where that is probable only; ends with an exception otherwise."""
    upstream: str = ""
    protected: bool = True
    """Whether safecompile promises that it is healthy."""
    needs: Literal["inductor", "gpu"] | None = None
    versions: str = ""
    """The torch versions that have it, where that is so by construction."""

    @property
    def module(self) -> str:
        """The module's name below ``safecompile.doctor.programs``."""
        return self.run.__module__.rpartition(".")[2]


def program(id: str, title: str, **options: Any) -> Callable[[Callable[[Case], str | None]], Program]:  # noqa: A002
    """Make a ``Program`` of the decorated function."""
    return lambda run: Program(id=id, title=title, run=run, **options)


def fault(text: str) -> NoReturn:
    """End the program: the hazard was seen."""
    raise FaultError(text)


def first_line(error: BaseException) -> str:
    """Return an exception as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])  # "backend='inductor' raised:"
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def attempt(what: str, function: Callable[[], Any], want: torch.Tensor | None = None) -> Any:
    """Call; it is a fault if that raises or, where a result is given, returns another one."""
    try:
        got = function()
    except (FaultError, HangError, NotApplicableError):
        raise
    except Exception as error:
        raise FaultError(f"{what}: {first_line(error)}") from error
    if want is not None:
        if type(got) is not torch.Tensor:
            fault(f"{what} returned a {type(got).__name__}")
        if not torch.allclose(got, want):
            fault(f"{what} returned other numbers")
    return got


def repeat(times: int, once: Callable[[], object]) -> str:
    """Run what shows a fault only sometimes; end with the first fault, and say which try it was."""
    sys.setswitchinterval(1e-6)  # a race is met sooner
    number = 0
    try:
        for number in range(1, times + 1):  # noqa: B007  a fault says it
            once()
    except FaultError as error:
        raise FaultError(f"{error} (try {number} of at most {times})") from error
    return f"{times} of {times} tries"


# ------------------------------------------------------------------------------------------------------------ threads


def together(*functions: Callable[[], object]) -> None:
    """Call each function in a thread of its own, all at the same time; raise the first exception."""
    start, errors = threading.Barrier(len(functions)), queue.SimpleQueue[BaseException]()

    def work(function: Callable[[], object]) -> None:
        try:
            start.wait(SECONDS)
            function()
        except BaseException as error:
            errors.put(error)

    threads = [threading.Thread(target=work, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not errors.empty():
        raise errors.get()


def elsewhere(function: Callable[[], _T]) -> _T:
    """Call in another thread, from beginning to end, at this very point of this thread's work."""
    results: list[_T] = []
    together(lambda: results.append(function()))
    return results[0]


def await_(event: threading.Event) -> None:
    """Wait for another thread, which is never slow."""
    if not event.wait(SECONDS):
        raise TimeoutError("another thread of the program did not get where it should")


@contextlib.contextmanager
def inside_elsewhere(context: Callable[[], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """Have another thread inside a context of its own."""
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        try:
            with context():
                entered.set()
                await_(leave)
        finally:
            entered.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    await_(entered)
    try:
        yield
    finally:
        leave.set()
        thread.join(SECONDS)


def company() -> contextlib.AbstractContextManager[None]:
    """Have another thread in the process. It does nothing."""
    return inside_elsewhere(contextlib.nullcontext)


# ------------------------------------------------------------------------------- compiles and traces that can be stopped


class CountingBackend:
    """Runs graphs as they are, and counts them. With ``gated`` each compile waits until ``release`` is set."""

    def __init__(self, *, gated: bool = False) -> None:
        self.count = 0
        self.entered, self.release = threading.Event(), threading.Event()
        self._gated, self._lock = gated, threading.Lock()

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        with self._lock:
            self.count += 1
        self.entered.set()
        if self._gated:
            await_(self.release)
        return graph.forward

    @contextlib.contextmanager
    def compiling(self, function: Callable[..., Any], *args: Any) -> Iterator[None]:
        """Have another thread in the middle of the compile of ``function``, which uses this gated backend."""
        errors: list[BaseException] = []

        def work() -> None:
            try:
                function(*args)
            except BaseException as error:
                errors.append(error)
            finally:
                self.entered.set()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        await_(self.entered)
        try:
            yield
        finally:
            self.release.set()
            thread.join(SECONDS)
        if errors:
            raise errors[0]


class Stops(torch.nn.Module):
    """Stops in its first call by one thread, in the middle of what that does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.thread: threading.Thread | None = None
        self.inside, self.go_on = threading.Event(), threading.Event()

    def forward(self, x: Any) -> Any:
        """Apply two layers."""
        y = self.a(x)
        if threading.current_thread() is self.thread:
            self.thread = None
            self.inside.set()
            await_(self.go_on)
        return self.b(y)


def in_the_middle_of(trace: Callable[[Any], Any], model: Stops, do: Callable[[], object]) -> Any:
    """Do something while another thread is in the middle of a trace; return what the trace returns or raises."""
    outcome: list[Any] = []

    def work() -> None:
        model.thread = threading.current_thread()
        try:
            outcome.append(trace(model))
        except BaseException as error:
            outcome.append(error)
        finally:
            model.inside.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    await_(model.inside)
    try:
        do()
    finally:
        model.go_on.set()
        thread.join(SECONDS)
    return outcome[0]


def names(graph_module: Any) -> list[str]:
    """Return the names of a traced graph's nodes; an exception is a fault."""
    if isinstance(graph_module, BaseException):
        raise FaultError(f"the trace: {first_line(graph_module)}") from graph_module
    return [node.name for node in graph_module.graph.nodes]


def example(rows: int = 2) -> torch.Tensor:
    """Return numbers for a model of width 4."""
    return torch.linspace(-1, 1, rows * 4).reshape(rows, 4)


def fresh(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Make a function with code of its own, for Dynamo keeps what it compiles by code: the sine of x + ``number``."""
    function: Callable[[torch.Tensor], torch.Tensor] = eval(f"lambda x: (x + {number}).sin()")  # noqa: S307
    return function
