"""Calls run eagerly, or fail, because of what another thread has asked for: its own calls, it thought.

`torch.compiler.set_stance` as a context manager is the process's: `force_eager` in one thread keeps all from compiling.
"""

from __future__ import annotations

import torch

from safecompile.doctor._program import Case, CountingBackend, attempt, fault, inside_elsewhere, program

__all__ = ["run"]


@program("S7", "set_stance in one thread decides for all", kind="silent", upstream="pytorch#196637")
def run(case: Case) -> None:
    backend, x = CountingBackend(), torch.ones(3)
    with inside_elsewhere(lambda: torch.compiler.set_stance("force_eager")):
        case.compile(lambda x: x.sin(), backend=backend)(x)
    if backend.count != 1:
        fault('a call ran eagerly, because another thread was inside set_stance("force_eager")')
    with inside_elsewhere(lambda: torch.compiler.set_stance("fail_on_recompile")):
        attempt("a call beside fail_on_recompile", lambda: case.compile(lambda x: x.cos(), backend=backend)(x), x.cos())
