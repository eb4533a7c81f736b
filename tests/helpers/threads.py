"""Threads that start together, end within a limit, and lose no exception."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import sys
import tempfile
import threading
import time
import traceback
from typing import TYPE_CHECKING, TypeVar, cast, overload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T")

DEFAULT_SECONDS = 60.0
_UNFINISHED = object()


class ThreadsHangError(AssertionError):
    """Some workers did not end within the limit; the message has the stacks of all threads."""


class WorkersFailedError(AssertionError):
    """Some workers raised; the message has their tracebacks, `errors` the exceptions by worker."""

    def __init__(self, message: str, errors: dict[int, BaseException]) -> None:
        super().__init__(message)
        self.errors = errors


@contextlib.contextmanager
def switch_interval(seconds: float = 1e-6) -> Iterator[None]:
    """Let the interpreter switch threads this often: a race that needs a switch in a narrow place is met sooner."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def all_stacks() -> str:
    """Return the stacks of all threads of this process."""
    with tempfile.TemporaryFile("w+") as file:  # faulthandler writes to a descriptor, without the interpreter lock
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


@overload
def gather_threads(work: Callable[[int], T], n: int, *, timeout: float = ...) -> list[T | BaseException]: ...
@overload
def gather_threads(work: Sequence[Callable[[], T]], *, timeout: float = ...) -> list[T | BaseException]: ...
def gather_threads(
    work: Callable[[int], T] | Sequence[Callable[[], T]], n: int | None = None, *, timeout: float = DEFAULT_SECONDS
) -> list[T | BaseException]:
    """Run workers at the same time, and return for each what it returned or raised.

    For a test that counts failures, as negative controls do. Otherwise use `run_threads`.

    Args:
        work: one function, called as `work(index)` by each of `n` workers, or one function for each worker.
        n: the number of workers; only with one function.
        timeout: seconds until all workers have to be through.

    Raises:
        ThreadsHangError: a worker is still running after `timeout`. It is left behind, as a daemon.
    """
    return _gather(_calls(work, n), timeout)


@overload
def run_threads(work: Callable[[int], T], n: int, *, timeout: float = ...) -> list[T]: ...
@overload
def run_threads(work: Sequence[Callable[[], T]], *, timeout: float = ...) -> list[T]: ...
def run_threads(
    work: Callable[[int], T] | Sequence[Callable[[], T]], n: int | None = None, *, timeout: float = DEFAULT_SECONDS
) -> list[T]:
    """Run workers at the same time and return their results in order; arguments as for `gather_threads`.

    Raises:
        WorkersFailedError: a worker raised; the message has every traceback.
        ThreadsHangError: a worker is still running after `timeout`.
    """
    outcomes = _gather(_calls(work, n), timeout)
    errors = _errors(outcomes)
    if errors:
        raise WorkersFailedError(f"{len(errors)} of {len(outcomes)} workers failed\n{_tracebacks(errors)}", errors)
    return cast("list[T]", outcomes)


def _calls(work: Callable[[int], T] | Sequence[Callable[[], T]], n: int | None) -> list[Callable[[], T]]:
    if not callable(work):
        if n is not None:
            raise TypeError("run_threads(functions): each function has one worker; leave n out")
        return list(work)
    if n is None:
        raise TypeError("run_threads(function, n): say how many workers are to call the function")
    return [functools.partial(work, index) for index in range(n)]


def _gather(calls: Sequence[Callable[[], T]], timeout: float) -> list[T | BaseException]:
    outcomes: list[object] = [_UNFINISHED] * len(calls)
    start = threading.Barrier(len(calls))

    def worker(index: int) -> None:
        try:
            start.wait(timeout)
            outcomes[index] = calls[index]()
        except BaseException as error:
            outcomes[index] = error

    # Daemons: one that hangs must not keep the process from ending.
    threads = [
        threading.Thread(target=worker, args=(index,), name=f"worker-{index}", daemon=True)
        for index in range(len(calls))
    ]
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))

    hanging = [thread.name for thread in threads if thread.is_alive()]
    if hanging:
        raise ThreadsHangError(
            f"{', '.join(hanging)} still running after {timeout:g} s\n"
            f"{_tracebacks(_errors(outcomes))}\nStacks of all threads:\n{all_stacks()}"
        )
    return cast("list[T | BaseException]", outcomes)  # no thread is alive, so that no _UNFINISHED is left


def _errors(outcomes: Sequence[object]) -> dict[int, BaseException]:
    return {index: outcome for index, outcome in enumerate(outcomes) if isinstance(outcome, BaseException)}


def _tracebacks(errors: dict[int, BaseException]) -> str:
    return "\n".join(
        f"worker-{index}:\n{''.join(traceback.format_exception(error))}" for index, error in errors.items()
    )


def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait until the condition is true, looking a thousand times a second."""
    pause = threading.Event()
    for _ in range(int(seconds * 1000)):
        if condition():
            return
        pause.wait(0.001)
    raise TimeoutError("the condition did not become true")
