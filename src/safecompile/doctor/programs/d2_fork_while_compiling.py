"""A forked child (a DataLoader worker, `multiprocessing`) hangs in its first compile, or whatever else takes the lock.

The fork came while another thread was compiling: in the child torch's compile lock is held by nobody, for ever.
"""

from __future__ import annotations

import faulthandler
import os

import torch

from safecompile.doctor._program import Case, CountingBackend, HangError, NotApplicableError, fault, program

__all__ = ["run"]


@program("D2", "a child forked while a thread compiles can never compile", kind="hang")
def run(case: Case) -> None:
    if not hasattr(os, "fork"):
        raise NotApplicableError("needs os.fork")
    x, backend = torch.ones(3), CountingBackend(gated=True)
    case.compile(lambda x: x * 3, backend="eager")(x)  # imports all that a compile needs
    with backend.compiling(case.compile(lambda x: x.sin(), backend=backend), x):
        child = os.fork()
        if not child:
            faulthandler.dump_traceback_later(case.patience, exit=True)
            got = case.compile(lambda x: x.cos(), backend="eager")(x)
            os._exit(0 if torch.equal(got, x.cos()) else 3)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 1:
        raise HangError(f"the child waits for a lock that nobody holds; given up after {case.patience:g} s")
    if code:
        fault(f"the child ended with exit code {code}")
