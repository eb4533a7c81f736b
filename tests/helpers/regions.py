"""What tests of checkpointed regions share: two dropouts whose gradient is known, and the company they run in."""

from __future__ import annotations

import contextlib
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar
from unittest import mock

import pytest
import torch
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from tests.helpers.threads import run_threads
from tests.helpers.torch_version import limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

T = TypeVar("T")

SECONDS = 30.0


def stock(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Make a region with torch's own function; it is the library's while the patches are installed."""
    return torch_checkpoint(function, *args, use_reentrant=False, **options)


def elsewhere(function: Callable[[], T]) -> T:
    """Run something on another thread, from beginning to end, at this very point of this thread's work."""
    return run_threads([function], timeout=SECONDS)[0]


@contextlib.contextmanager
def another_thread() -> Iterator[None]:
    """Have another thread in the process. It does nothing."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait, args=(SECONDS,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Let the process have one thread: what libraries and other tests have left running is not counted."""
    enumerate_all, all_frames, me = threading.enumerate, sys._current_frames, threading.get_ident()
    others = set(all_frames()) - {me}

    def started() -> list[threading.Thread]:
        return [thread for thread in enumerate_all() if thread.ident not in others]

    def frames() -> dict[int, FrameType]:
        return {ident: frame for ident, frame in all_frames().items() if ident not in others}

    with (
        mock.patch.object(threading, "enumerate", started),
        mock.patch.object(sys, "_current_frames", frames),
    ):
        yield


COMPANIES = {"alone": alone, "among threads": another_thread}
in_any_company = pytest.mark.usefixtures("company")  # the test runs once in each

COMPILED_ONCE = limit((2, 9), "one compile for a callable in a region that looks for random numbers")


def draw(size: int = 64) -> None:
    """Draw random numbers, as many as a region does."""
    torch.rand(size)


def draw_elsewhere(size: int = 64) -> None:
    """Let another thread draw."""
    elsewhere(lambda: draw(size))


def ones(size: int = 64) -> Tensor:
    """Return the argument of `two_dropouts`."""
    return torch.ones(size, requires_grad=True)


def two_dropouts(x: Tensor) -> Tensor:
    """Over ones, the output shows which numbers the forward drew, and with them the gradient to be expected."""
    return dropout(dropout(x.sin()).sin())


def right_gradient(y: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of `two_dropouts`, from its output."""
    between = 2 * x.detach().sin()
    return (y.detach() != 0) * 2 * between.cos() * 2 * x.detach().cos()


def backward(y: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of the sum."""
    (grad,) = torch.autograd.grad(y.sum(), x)
    return grad


def interrupted_in(run: int, do: Callable[[], object] = draw) -> Callable[[Tensor], Tensor]:
    """Make `two_dropouts` let another thread do something between the two, in one of its runs (the forward is 1)."""
    runs = 0

    def region(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        y = dropout(x.sin())
        if runs == run:
            elsewhere(do)
        return dropout(y.sin())

    return region
