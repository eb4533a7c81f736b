"""Whether the calling thread is the only one of the process that can draw random numbers or change settings."""

from __future__ import annotations

import sys
import threading
from typing import Any

__all__ = ["Others", "alone"]


def alone() -> bool:
    """Tell whether no other thread of the process can draw random numbers.

    The engine's threads of a backward work for the thread that called it; threads of Inductor compile.
    """
    me, frames = threading.get_ident(), None
    threads = threading.enumerate()
    started = [t for t in threads if not isinstance(t, threading._DummyThread) and not _is_helper(t)]
    if len(started) > 1:
        return False
    for thread in threads:
        if thread.ident != me and isinstance(thread, threading._DummyThread):
            frames = frames or sys._current_frames()
            frame = frames.get(thread.ident or 0)
            while frame is not None and frame.f_back is not None:
                frame = frame.f_back
            if frame is not None and not frame.f_globals.get("__name__", "").startswith("torch."):
                return False
    return True


def _is_helper(thread: Any) -> bool:
    runs = getattr(thread, "_target", None) or type(thread)
    if runs.__module__ == "concurrent.futures.thread":
        async_compile = sys.modules.get("torch._inductor.async_compile")
        pool = getattr(async_compile, "AsyncCompile", None) and async_compile.AsyncCompile.pool  # type: ignore[union-attr]
        return bool(pool and pool.cache_info().currsize and thread in pool()._threads)
    return runs.__module__.startswith(("torch._inductor.", "tqdm."))


class Others:
    """Tells whether there is another thread, now or at some time before the end of the ``with`` block."""

    def __enter__(self) -> Others:  # noqa: PYI034  Self is newer than Python 3.10
        self.seen = self.from_the_start = not alone()
        if not self.seen:
            # Called in each new thread before anything of it runs.
            self._profile: Any = threading.getprofile()
            threading.setprofile(self._notice)
        return self

    def _notice(self, *_: Any) -> None:
        self.seen |= not _is_helper(threading.current_thread())
        sys.setprofile(self._profile)

    def __exit__(self, *_: object) -> None:
        if not self.from_the_start:
            threading.setprofile(self._profile)
