"""Whether the calling thread is the only one of the process that can draw random numbers or change settings."""

from __future__ import annotations

import sys
import threading
from typing import Any

from safecompile._core.stacks import stacks_of_others

# The engine's threads of a backward work for the thread that called it; one of execnet reads what pytest-xdist says.
_HARMLESS = (
    "torch.autograd.",
    "torch.utils.checkpoint",
    "torch._functorch.",
    "torch._dynamo.",
    "torch._inductor.",
    "execnet.",
)


def alone() -> bool:
    """Tell whether no other thread of the process can draw random numbers, Python's and foreign ones alike."""
    started = {t.ident: t for t in threading.enumerate() if not isinstance(t, threading._DummyThread)}
    if len(started) > 1 and sum(not _is_helper(thread) for thread in started.values()) > 1:
        return False
    foreign = [frames[-1] for ident, frames in stacks_of_others().items() if ident not in started]
    return all(frame.f_globals.get("__name__", "").startswith(_HARMLESS) for frame in foreign)


def _is_helper(thread: Any) -> bool:
    """Tell whether a thread is one of Inductor's, which compile, of a progress bar, or the one of ``device_guard``."""
    runs = getattr(thread, "_target", None) or type(thread)
    module = str(getattr(runs, "__module__", ""))
    if module == "concurrent.futures.thread":
        async_compile = sys.modules.get("torch._inductor.async_compile")
        pool = getattr(async_compile, "AsyncCompile", None) and async_compile.AsyncCompile.pool  # type: ignore[union-attr]
        return bool(pool and pool.cache_info().currsize and thread in pool()._threads)
    return module.startswith(("torch._inductor.", "tqdm.", "safecompile._patches.device_guard"))


class Others:
    """Tells whether there is another thread, now or at some time before the end of the ``with`` block."""

    def __enter__(self) -> Others:  # noqa: PYI034  Self is newer than Python 3.10
        self.seen = self.from_the_start = not alone()
        if not self.seen:
            # Called in each new thread before anything of it runs.
            self._profile: Any = threading.getprofile()
            self._hook = self._notice
            threading.setprofile(self._hook)
        return self

    def look(self) -> bool:
        """Look again; return whether one was there at any time."""
        self.seen = self.seen or not alone()
        return self.seen

    def _notice(self, *event: Any) -> None:
        self.seen |= not _is_helper(threading.current_thread())
        sys.setprofile(self._profile)
        if self._profile is not None:
            self._profile(*event)

    def __exit__(self, *_: object) -> None:
        if not self.from_the_start and threading.getprofile() is self._hook:
            threading.setprofile(self._profile)
