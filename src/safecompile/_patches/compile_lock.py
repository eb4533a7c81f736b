"""torch's compile lock, with an owner that everybody can see."""

from __future__ import annotations

import threading
from typing import Any, cast

import torch

from safecompile._core import events
from safecompile._core.lock import FXTraceLock
from safecompile._patches.point import PatchPoint

_own_lock: Any = None


def compile_lock() -> Any:
    """Return torch's compile lock, also while our own stands in its place."""
    from torch._dynamo import convert_frame

    return _own_lock or convert_frame.compile_lock


class CompileLock(PatchPoint):
    name = "compile-lock"
    protects = "waits for a compile that nobody can see the holder of, and that never end (D1)"
    upstream = "torch/_dynamo/convert_frame.py, compile_lock"
    relies_on = ("torch._dynamo.convert_frame:compile_lock",)

    def __init__(self, lock: FXTraceLock) -> None:
        super().__init__()
        self._lock = lock

    def apply(self) -> None:
        global _own_lock  # noqa: PLW0603  torch has one compile lock, too
        from torch._dynamo import convert_frame

        _own_lock = convert_frame.compile_lock
        self.replace(convert_frame, "compile_lock", self._lock)

    def restore(self) -> None:
        global _own_lock  # noqa: PLW0603
        from torch._dynamo import convert_frame

        still_ours = cast("Any", convert_frame.compile_lock) is self._lock
        super().restore()
        if still_ours:
            convert_frame.compile_lock = _own_lock  # another one than before in a forked process
        _own_lock = None

    def after_fork(self) -> None:
        """Give the process a lock that no thread holds; the one that did was not forked (D2; pytorch#198246)."""
        global _own_lock  # noqa: PLW0603
        from torch._dynamo import callback

        if not compile_lock()._is_owned():
            _own_lock = threading.RLock()
            self._lock.forget_other_threads()
            events.forget_other_threads()
            # The same for the compiles that Dynamo believes to be going on.
            pending = "_CompilationCallbackHandler__pending_callbacks_counter"
            vars(callback.callback_handler).update({pending: 0, f"{pending}_lock": threading.Lock()})
            progress_bar: Any = vars(torch.hub)["tqdm"]  # FX's interpreter makes one, shown or not
            if hasattr(progress_bar, "set_lock"):
                progress_bar.set_lock(threading.RLock())
