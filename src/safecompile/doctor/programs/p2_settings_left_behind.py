"""Nothing is compiled any more, or checkpoint keeps another mode, long after the threads that asked for it have ended.

`set_stance` and checkpoint's `set_checkpoint_early_stop` put back what they found: when two threads leave in the order
in which they came, the first one's setting stays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import set_checkpoint_early_stop

from safecompile.doctor._program import Case, CountingBackend, await_, fault, program, together

__all__ = ["run"]


def _leave_in_order(
    first: Callable[[], AbstractContextManager[Any]], last: Callable[[], AbstractContextManager[Any]]
) -> None:
    first_in, last_in, first_out = threading.Event(), threading.Event(), threading.Event()

    def leaves_first() -> None:
        with first():
            first_in.set()
            await_(last_in)
        first_out.set()

    def leaves_last() -> None:
        await_(first_in)
        with last():
            last_in.set()
            await_(first_out)

    together(leaves_first, leaves_last)


@program("P2", "a stance or a checkpoint setting is left behind for good", kind="broken for good")
def run(case: Case) -> None:
    stance, x = torch.compiler.set_stance, torch.ones(3, requires_grad=True)
    ends: list[None] = []

    def region(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        ends.append(None)
        return y

    _leave_in_order(lambda: stance("force_eager"), lambda: stance("default"))
    backend = CountingBackend()
    case.compile(lambda x: x.sin(), backend=backend)(x)
    if not backend.count:
        fault("nothing is compiled any more: the stance force_eager has outlived its threads")
    _leave_in_order(lambda: set_checkpoint_early_stop(False), lambda: set_checkpoint_early_stop(True))
    case.checkpoint(region, x).sum().backward()
    if len(ends) > 1:
        fault("checkpoint's early stop stays switched off: the setting has outlived its threads")
