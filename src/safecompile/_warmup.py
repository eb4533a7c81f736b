"""``warmup``: compile before serving or training, in the calling thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from safecompile._core.errors import UnsupportedCallableError
from safecompile._patches import gate
from safecompile._patches.checkpoint import tensors_in

__all__ = ["WarmupReport", "warmup"]


@dataclass(frozen=True)
class WarmupReport:
    """What a warm-up did."""

    thread: str
    graphs: int
    """Frames that the calling thread compiled (the parts of a graph-broken function count each)."""
    seconds: float


def warmup(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    kwargs: Mapping[str, Any] | None = None,
    backward: bool = False,
) -> WarmupReport:
    """Call ``fn(*inputs, **kwargs)`` once in the calling thread, so that later calls compile nothing.

    Call it with the settings that later calls have (grad mode, autocast, intra-op threads;
    see :func:`~safecompile.capture_context`): they are part of what is compiled for. Random numbers are drawn as
    by any call.

    Args:
        fn: a guarded callable, or any function that calls some.
        inputs: the positional arguments.
        kwargs: the keyword arguments.
        backward: also run the backward, which is compiled when first used. Gradients are computed for
            every leaf and thrown away: no ``.grad`` changes.

    Raises:
        UnsupportedCallableError: ``fn`` is not callable.
        TypeError: ``inputs`` is not a tuple or list.
        ValueError: ``backward`` was asked for, but no output needs a gradient.
    """
    if not callable(fn):
        raise UnsupportedCallableError(f"warmup cannot call {type(fn).__name__}: give a function or module.")
    if not isinstance(inputs, (tuple, list)):
        raise TypeError(
            f"warmup takes the positional arguments as a tuple or list, not {type(inputs).__name__}; "
            "for one tensor x, give (x,)."
        )
    me = threading.get_ident()
    compiled, start = gate.compiled_by(me), time.perf_counter()
    outputs = fn(*inputs, **(kwargs or {}))
    if backward:
        _run_backward(outputs)
    return WarmupReport(threading.current_thread().name, gate.compiled_by(me) - compiled, time.perf_counter() - start)


def _run_backward(outputs: Any) -> None:
    tensors = [t for t in tensors_in(outputs) if t.requires_grad]
    if not tensors:
        raise ValueError(
            "warmup(backward=True): no output needs a gradient; call it with grad mode on and with inputs or "
            "parameters that require gradients, or leave backward out."
        )
    leaves = _leaves([t.grad_fn for t in tensors])
    torch.autograd.grad(tensors, leaves, [torch.ones_like(t) for t in tensors], allow_unused=True)


def _leaves(nodes: list[Any]) -> list[torch.Tensor]:
    """Return the leaf tensors that the graph of ``nodes`` accumulates gradients into."""
    leaves, seen = [], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        nodes += [following for following, _ in node.next_functions]
    return leaves
