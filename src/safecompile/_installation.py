"""``install``, ``uninstall`` and ``statistics``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from safecompile._core.errors import PatchesInUseError
from safecompile._core.guarded import CallableStatistics, statistics_of_all
from safecompile._core.lock import LockStatistics
from safecompile._patches import fx_trace_lock, gate, patches

__all__ = ["PatchStatus", "Statistics", "install", "reset", "statistics", "uninstall"]


@dataclass(frozen=True)
class PatchStatus:
    """One patch point."""

    name: str
    protects: str
    upstream: str
    installed: bool


@dataclass(frozen=True)
class Statistics:
    """A snapshot of the library's work in this process."""

    installed: bool
    patches: tuple[PatchStatus, ...]
    compiled: int
    """Frames compiled since the patches were first installed, by guarded callables and by others."""
    looked_again: int
    """Calls that found another thread's finished compile instead of compiling for themselves."""
    lock: LockStatistics
    callables: tuple[CallableStatistics, ...]
    """Each guarded callable that is still there."""


def install(*, strict: bool = False) -> None:
    """Install the patches now; the first guarded call does it otherwise. Does nothing if they are installed.

    With the patches in place, plain ``torch.compile`` callables, eager modules and FX traces of other
    threads are protected from the first moment on.

    Args:
        strict: raise if a patch point does not match this torch; otherwise it is named in a warning, once.

    Raises:
        PatchMismatchError: ``strict`` and a patch point does not match.
        PatchesInUseError: the calling thread is inside a trace or compile.
    """
    if not patches.install(strict=strict):
        raise PatchesInUseError(
            "cannot install the patches: the calling thread is inside a trace or compile that began without them; "
            "install before it begins."
        )


def uninstall() -> None:
    """Restore every attribute of torch that was changed, except where somebody else has changed it since.

    A later guarded call installs again.

    Raises:
        PatchesInUseError: a guarded call or a trace is in flight.
    """
    patches.uninstall()


def reset() -> None:
    """Forget everything that is compiled, when no call is in flight; new calls wait until it is done.

    With the patches installed, torch's own two functions do the same.

    Raises:
        PatchesInUseError: inside a guarded call, or calls in flight do not end within ``fx_trace_lock.limit``.
    """
    install()
    torch.compiler.reset()


def statistics() -> Statistics:
    """Return what is installed, what was compiled, the state of the lock, and what each callable's calls came to."""
    return Statistics(
        installed=bool(gate.epoch),
        patches=tuple(PatchStatus(p.name, p.protects, p.upstream, p.active) for p in patches.points),
        compiled=gate.compiled,
        looked_again=gate.looked_again,
        lock=fx_trace_lock.statistics(),
        callables=statistics_of_all(),
    )
