"""Ctrl-C and SIGTERM: the first one ends the program in order, the second one at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


_received: list[int] = []
_kept_back = threading.Event()


class Interrupted(KeyboardInterrupt):
    """Raised in the main thread by the first signal.

    Attributes:
        code: the process's exit code by the convention of shells, 130 for Ctrl-C and 143 for SIGTERM.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number


def keep() -> None:
    """Keep a first SIGTERM from now on, which is early in a program's imports, for the first `kept_back` to raise."""
    _kept_back.set()
    _install([signal.SIGTERM])


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, the first SIGINT or SIGTERM raises `Interrupted` in the main thread, which has to be this one; the second ends the
    process with that exit code, whatever it does.
    """
    before = _install(SIGNALS)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _received.clear()
        _kept_back.clear()


@contextmanager
def kept_back() -> Iterator[Callable[[], bool]]:
    """Inside, within `interruptible`, a first SIGTERM is kept until the end of the block; tell in the meantime whether one has come."""
    _kept_back.set()
    try:
        yield lambda: bool(_received)
    finally:
        _kept_back.clear()
    if _received:
        raise Interrupted(_received[0])


def _install(numbers: Iterable[int]) -> dict[int, Any]:
    # One that is ignored, as by nohup or for a background job of a script, stays ignored.
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, _handle) for number in heard}


def _handle(number: int, frame: FrameType | None) -> None:
    if _received:
        os.write(2, b"\nstopped at once\n")  # not print: the interrupted code may hold the stream's lock
        os._exit(128 + number)
    _received.append(number)
    if number != signal.SIGTERM or not _kept_back.is_set():
        raise Interrupted(number)
