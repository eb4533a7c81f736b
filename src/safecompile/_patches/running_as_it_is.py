"""What Dynamo's callback returns to have a frame run as it is, this once."""

from __future__ import annotations

import threading
from types import CodeType
from typing import Any

from safecompile._core import events
from safecompile._core.guarded import Guarded
from safecompile._patches.per_call_settings import excuse_fullgraph_call


def can_run_once_as_it_is() -> bool:
    """Tell whether a frame can be run as it is this once: torch 2.6 would never compile its code then."""
    from torch._dynamo import types

    return hasattr(types, "ConvertFrameReturn")


def in_a_checkpoint() -> bool:
    """Tell whether a frame must save the same tensors, or draw the same numbers, as in a recomputation."""
    from torch._C import _autograd

    top = getattr(_autograd, "_top_saved_tensors_default_hooks", None)  # not in torch 2.6
    return regions.inside or (top is not None and top(True) is not None)


class _Regions(threading.local):
    inside = False


regions = _Regions()
"""Whether the calling thread is in a checkpointed region: reentrant ones of torch's show it by nothing else."""


def run_once_as_it_is(code: CodeType, why: str, guarded: Guarded | None, *, use_cache: bool = False) -> Any:
    """Let a frame run as it is, with what it calls; with ``use_cache`` what is compiled already of that is used."""
    from torch._dynamo import types

    excuse_fullgraph_call()
    if guarded is not None:
        guarded.ran_eagerly()
    thread = threading.current_thread().name
    events.publish(
        events.EagerRun(*events.described(code), thread, threading.get_ident(), events.clock(), why, guarded)
    )
    action = types.FrameAction.RUN_ONLY if use_cache else types.FrameAction.SKIP  # type: ignore[attr-defined]
    return as_it_is(why, frame_exec_strategy=types.FrameExecStrategy(action, action))  # type: ignore[attr-defined]


def as_it_is(why: str, **strategy: Any) -> Any:
    """Let a frame run as it is, but not what it calls."""
    from torch._dynamo import types

    if "skip_reason" in types.ConvertFrameReturn.__dataclass_fields__:  # newer than torch 2.8
        strategy["skip_reason"] = why
    return types.ConvertFrameReturn(apply_to_code=False, **strategy)
