"""For the tests of programs with threads: how much is compiled, and in which order locks are taken.

``max_compiles`` and ``no_compiles`` say of each compile that is too many which function it was, and which guard or
argument made it necessary. ``lock_order`` finds orders of locks that can deadlock, although no threads meet.

With pytest: ``pytest_plugins = ["safecompile.testing.pytest_plugin"]`` in ``conftest.py`` gives the fixtures
``max_compiles`` and ``no_compiles``.
"""

from __future__ import annotations

from safecompile._core.events import Compile
from safecompile.testing._compiles import CompileLimitError, MaxCompiles, max_compiles, no_compiles
from safecompile.testing._lock_order import LockOrder, LockOrderError, lock_order

__all__ = [
    "Compile",
    "CompileLimitError",
    "LockOrder",
    "LockOrderError",
    "MaxCompiles",
    "lock_order",
    "max_compiles",
    "no_compiles",
]
