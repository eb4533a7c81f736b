"""What is done on a torch that a patch point does not match."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from safecompile._core.lock import FXTraceLock
from safecompile._patches.point import PatchPoint


class SerialTraces(PatchPoint):
    """Makes traces and compiles take turns, if they cannot be kept apart.

    A trace then runs the user's code under the lock, as nowhere else. Eager calls take no lock, and stay unprotected.
    """

    name = "serial-traces"
    protects = "traces and compiles, on a torch that another patch point does not match"
    upstream = "torch/fx/_symbolic_trace.py, Tracer.trace"

    def __init__(self, lock: FXTraceLock, mismatches: list[str]) -> None:
        """``mismatches`` says which points do not match, once all others have been installed."""
        super().__init__()
        self._lock, self._mismatches = lock, mismatches

    def needed(self) -> bool:
        return bool(self._mismatches)

    def apply(self) -> None:
        import torch.export
        from torch.fx.experimental import proxy_tensor

        self.wrap(torch.fx.Tracer, "trace", self._take_turns)
        self.wrap(torch.export, "export", self._take_turns)
        if hasattr(proxy_tensor, "_MakefxTracer"):
            self.wrap(proxy_tensor._MakefxTracer, "trace", self._take_turns)

    def _take_turns(self, trace: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        with self._lock, self._lock.doing("tracing"):
            return trace(*args, **kwargs)
