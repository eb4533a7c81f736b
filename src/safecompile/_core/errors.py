"""Every error the library raises. Each message says what happened, who holds what, and what to do."""

from __future__ import annotations


class SafeCompileError(Exception):
    """Base class of the library's own errors."""


class ArgumentChangedError(SafeCompileError, RuntimeError):
    """Another thread changed an argument while a call was being compiled with it."""


class CompileInProgressError(SafeCompileError, RuntimeError):
    """A call needs a graph while another thread compiles (``when_compiling="error"``)."""


class LockTimeoutError(SafeCompileError):
    """A wait for the FX-trace lock reached its limit."""


class WaitCycleError(LockTimeoutError):
    """A wait for the FX-trace lock that cannot end: the thread that has it waits for the one that waits for it."""

    def __init__(self, message: str, waiter: int = 0) -> None:
        """``waiter`` is the ident of the thread that waits for the lock."""
        super().__init__(message, waiter)
        self.waiter = waiter

    def __str__(self) -> str:
        return str(self.args[0])


class UnsupportedCallableError(SafeCompileError, TypeError):
    """What was given to the library cannot be compiled or checkpointed."""


class PatchMismatchError(SafeCompileError):
    """A patch point does not match the installed torch (``install(strict=True)``)."""


class PatchesInUseError(SafeCompileError, RuntimeError):
    """The patches cannot be changed now, because a thread is inside code that relies on them."""


class CheckpointRandomnessError(SafeCompileError, RuntimeError):
    """A checkpoint's recomputation saw other random numbers than its forward."""


class ContextConflictError(SafeCompileError, RuntimeError):
    """Two threads need different values of a setting that belongs to the whole process."""


class WarmupTimeoutError(SafeCompileError, TimeoutError):
    """The workers of an executor that is to be warmed up were too busy to meet."""
