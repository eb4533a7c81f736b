"""Ctrl-C and SIGTERM: the first one ends the program in order, the second one at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """Raised in the main thread by the first signal.

    Attributes:
        code: the process's exit code by the convention of shells, 130 for Ctrl-C and 143 for SIGTERM.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, the first SIGINT or SIGTERM raises `Interrupted` in the main thread, which has to be this one; the second ends the
    process with that exit code, whatever it does.
    """
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if received:
            os.write(2, b"\nstopped at once\n")  # not print: the interrupted code may hold the stream's lock
            os._exit(128 + number)
        received.append(number)
        raise Interrupted(number)

    # One that is ignored, as by nohup or for a background job of a script, stays ignored.
    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
