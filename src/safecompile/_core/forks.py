"""Locks that a forked process can go on with."""

from __future__ import annotations

import os
import threading
from typing import Any

__all__ = ["lock_across_forks"]


def lock_across_forks() -> Any:
    """Return a reentrant lock that no other thread holds in the moment of a fork, so that what it guards is whole.

    For locks that are held for a moment and never while code runs that is not ours. A fork takes the one made last
    first; whoever takes two takes them in this order.
    """
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock
