"""What a patch point is, and the two ways to change torch so that it can be put back."""

from __future__ import annotations

import pkgutil
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import wrapt

from safecompile._core.stacks import outwards, stacks_of_others

_ABSENT = object()

Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]


class PatchPoint(ABC):
    """One place in torch that is changed while the patches are installed.

    Subclasses say what the point protects and make the change in ``apply`` with ``replace``,
    ``wrap`` and ``recode``, which remember what was there.
    """

    name: str
    protects: str
    """What goes wrong in torch without it."""
    upstream: str
    """The public report, or the torch source file that shows the cause."""
    relies_on: tuple[str, ...] = ()
    """What has to be there, as ``"module:name"``."""
    old_code_may_run = False
    """Whether threads inside replaced code do no harm, and the installation need not wait for them."""

    def __init__(self) -> None:
        self.active = False
        self._changes: list[tuple[Any, str, Any, Any]] = []
        self._switches: list[list[bool]] = []

    def mismatch(self) -> str | None:
        """Say what this torch lacks that the point relies on, or ``None`` if it matches."""
        missing = [name.replace(":", ".") for name in self.relies_on if not _is_there(name)]
        return f"there is no {', '.join(missing)}" if missing else None

    def needed(self) -> bool:
        """Tell whether this torch has the fault at all."""
        return True

    @abstractmethod
    def apply(self) -> None:
        """Make the changes."""

    def after_fork(self) -> None:  # noqa: B027  most points have nothing to forget
        """Forget what other threads did: in a forked process there is only the one that forked."""

    def install(self) -> None:
        """Make the changes, or none of them."""
        if self.active:
            return
        try:
            self.active = True
            self.apply()
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        """Undo the changes, but leave alone what somebody else has changed since."""
        self.active = False
        while self._switches:
            self._switches.pop()[0] = False
        while self._changes:
            owner, name, old, new = self._changes.pop()
            if _get(owner, name) is new:
                delattr(owner, name) if old is _ABSENT else setattr(owner, name, old)

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Replace the attribute ``name`` of ``owner``."""
        self._changes.append((owner, name, _get(owner, name), new))
        setattr(owner, name, new)

    def wrap(self, owner: Any, name: str, wrapper: Wrapper) -> None:
        """Put ``wrapper(wrapped, instance, args, kwargs)`` around a function or method.

        If somebody else wraps it after us, restoring leaves it in place, switched off.

        Raises:
            AttributeError: if there is nothing to wrap, so that the point does not match this torch.
        """
        wrapped = _get(owner, name)
        if wrapped is _ABSENT:
            raise AttributeError(f"{owner.__name__} has no {name}")
        switch = [True]
        self._switches.append(switch)
        self.replace(owner, name, wrapt.FunctionWrapper(wrapped, wrapper, enabled=lambda: switch[0]))

    def recode(self, function: FunctionType, code: CodeType) -> None:
        """Give ``function`` other code. It stays the same object for all who hold it: Dynamo keys its tables on it."""
        self.replace(function, "__code__", code)

    def replaced_code(self) -> set[CodeType]:
        """Return the code that threads which entered before the change may still be running."""
        return set() if self.old_code_may_run else {old for _, name, old, _ in self._changes if name == "__code__"}

    def replacing_code(self) -> set[CodeType]:
        """Return the code that threads inside changed functions run."""
        return {new for _, name, _, new in self._changes if name == "__code__"}


def _is_there(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        return False
    return True


def _get(owner: Any, name: str) -> Any:
    """Read the attribute as it is stored, without binding it."""
    return vars(owner)[name] if name in vars(owner) else getattr(owner, name, _ABSENT)


def threads_running(codes: set[CodeType]) -> set[int]:
    """Return the idents of the threads that have a frame of one of ``codes`` on their stack."""
    found, wanted = set(), {id(code) for code in codes}  # code that Dynamo has made may have no hash
    for ident, frames in [*stacks_of_others().items(), (threading.get_ident(), outwards(sys._getframe(1)))]:
        if any(id(frame.f_code) in wanted for frame in frames):
            found.add(ident)
    return found
