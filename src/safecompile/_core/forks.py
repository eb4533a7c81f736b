"""Locks that a forked process can go on with."""

from __future__ import annotations

import functools
import os
import sys
import threading
from typing import Any


def lock_across_forks() -> Any:
    """Return a reentrant lock that no other thread holds in the moment of a fork, so that what it guards is whole.

    For locks that are held for a moment and never while code runs that is not ours. A fork takes the one made last
    first; whoever takes two takes them in this order.
    """
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


def renew_property_locks() -> None:
    """Give each ``functools.cached_property`` a new lock in a forked process: a thread that is not there may have it.

    Before Python 3.12 each has one for all instances, and torch's compiles have many such properties.
    """
    if sys.version_info >= (3, 12):
        return
    classes, look = set[type](), [object]
    while look:
        new = set(type.__subclasses__(look.pop())) - classes
        classes |= new
        look += new
    for value in (value for cls in classes for value in vars(cls).values()):
        if isinstance(value, functools.cached_property):
            value.lock = threading.RLock()  # type: ignore[attr-defined]
