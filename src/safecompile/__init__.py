"""Make ``torch.compile`` and activation checkpointing right when a process has threads."""

from __future__ import annotations

from safecompile import observe
from safecompile._checkpoint import checkpoint, checkpoint_sequential
from safecompile._compile import thread_safe_compile
from safecompile._context import capture_context
from safecompile._core.errors import (
    ArgumentChangedError,
    CheckpointRandomnessError,
    CompileInProgressError,
    ContextConflictError,
    LockTimeoutError,
    PatchesInUseError,
    PatchMismatchError,
    SafeCompileError,
    UnsupportedCallableError,
    WaitCycleError,
    WarmupTimeoutError,
)
from safecompile._installation import install, reset, statistics, uninstall
from safecompile._patches import fx_trace_lock
from safecompile._warmup import warmup

__all__ = [
    "ArgumentChangedError",
    "CheckpointRandomnessError",
    "CompileInProgressError",
    "ContextConflictError",
    "LockTimeoutError",
    "PatchMismatchError",
    "PatchesInUseError",
    "SafeCompileError",
    "UnsupportedCallableError",
    "WaitCycleError",
    "WarmupTimeoutError",
    "capture_context",
    "checkpoint",
    "checkpoint_sequential",
    "fx_trace_lock",
    "install",
    "observe",
    "reset",
    "statistics",
    "thread_safe_compile",
    "uninstall",
    "warmup",
]
