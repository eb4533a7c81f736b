"""A pytest plugin: a test that hangs ends the run with the stacks of all threads.

The limit holds for each of set-up, call and tear-down. faulthandler's own watchdog does it, because it needs no
interpreter lock: a thread that hangs inside C code with the lock held is shown as well. It cannot fail one test and go
on, since the threads that hang would still be there; it ends the process with exit code 1.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

DEFAULT_SECONDS = 120.0
# Threads that are not daemons are joined when the interpreter ends; that can hang, too.
EXIT_SECONDS = 60.0

_stderr_fd = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "hang_timeout(seconds): limit for each of set-up, call and tear-down")
    # pytest's capture redirects the descriptor 2 while a test runs, and would take the dump with it.
    config.stash[_stderr_fd] = os.dup(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2)


def pytest_unconfigure(config: pytest.Config) -> None:
    faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True, file=config.stash[_stderr_fd])


def _limited(item: pytest.Item) -> Generator[None, object, object]:
    marker = item.get_closest_marker("hang_timeout")
    seconds = float(marker.args[0]) if marker else DEFAULT_SECONDS
    faulthandler.dump_traceback_later(seconds, exit=True, file=item.config.stash[_stderr_fd])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


# Armed for each phase by itself: pytest disarms the watchdog when a phase fails, and the tear-down still has to end.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _limited(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _limited(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _limited(item))
