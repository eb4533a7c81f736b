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
from safecompile._patches.generators import tensors_in

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
        _run_backward(outputs, tensors_in((inputs, dict(kwargs or {}))))
    return WarmupReport(threading.current_thread().name, gate.compiled_by(me) - compiled, time.perf_counter() - start)


def _run_backward(outputs: Any, inputs: list[torch.Tensor]) -> None:
    tensors = [t for t in tensors_in(outputs) if t.grad_fn is not None]
    if not tensors:
        raise ValueError(
            "warmup(backward=True): no output needs a gradient; call it with grad mode on and with inputs or "
            "parameters that require gradients, or leave backward out."
        )
    sources = _sources([t.grad_fn for t in tensors], [t for t in inputs if t.grad_fn is not None])
    torch.autograd.grad(tensors, sources, [torch.ones_like(t) for t in tensors], allow_unused=True)


def _sources(nodes: list[Any], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors from which the graph of ``nodes`` starts: leaves, and inputs with a graph of their own."""
    own = {t.grad_fn: t for t in inputs}
    sources, seen = [], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in own:
            sources.append(own[node])
        elif type(node).__name__ == "AccumulateGrad":
            sources.append(node.variable)
        else:
            nodes += [following for following, _ in node.next_functions]
    return sources
