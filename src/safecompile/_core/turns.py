"""What the threads that use one device do in turn."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from safecompile._core.errors import LockTimeoutError


class Turn:
    """A reentrant lock for what one thread at a time may do with a device. No wait for it is without limit."""

    def __init__(self, device: object, limit: Callable[[], float]) -> None:
        self._device, self._limit = device, limit
        self._lock = threading.RLock()
        self._holder = ("", 0.0)  # written only by the thread that has the lock

    def acquire(self, blocking: bool = True) -> bool:
        """Take the turn; return whether it was taken, which ``blocking=False`` does not wait for.

        Raises:
            LockTimeoutError: the limit passed; names the thread whose turn it is.
        """
        taken = self._lock.acquire(blocking=False) or (blocking and self._lock.acquire(timeout=self._limit()))
        if taken:
            self._holder = threading.current_thread().name, time.monotonic()
        elif blocking:
            name, since = self._holder
            raise LockTimeoutError(
                f"a turn on device {self._device} did not come: thread {name!r} has recorded CUDA graphs, tuned kernels or "
                f"waited for the device for {time.monotonic() - since:.0f} s. Let nothing that is recorded wait for another "
                "thread, and warm up before the threads serve."
            )
        return taken

    def release(self) -> None:
        """Give the turn back."""
        self._lock.release()

    def __enter__(self) -> None:
        """Take the turn, or raise as :meth:`acquire` does."""
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Turns(dict[int, Turn]):
    """The turns of the devices, by their index."""

    def __init__(self, limit: Callable[[], float]) -> None:
        super().__init__()
        self._limit = limit

    def __missing__(self, device: int) -> Turn:
        return self.setdefault(device, Turn(device, self._limit))

    def take_all(self) -> list[Turn]:
        """Take those of all devices, or none if a thread has one of them: it may be waiting for another."""
        taken: list[Turn] = []
        for turn in list(self.values()):
            if not turn.acquire(blocking=False):
                while taken:
                    taken.pop().release()
                break
            taken.append(turn)
        return taken
