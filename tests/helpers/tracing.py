"""Traces that stop in the middle until the test lets them go on, and a model that shows what they disturb."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx

from tests.helpers.torch_version import TORCH

if TYPE_CHECKING:
    from collections.abc import Iterator

SECONDS = 60.0


def is_exporting() -> bool:
    """Tell whether the calling thread exports, which torch 2.6 does not tell, and later ones say of every compile, too."""
    exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", bool)
    return not torch.compiler.is_dynamo_compiling() and exporting()


def is_symbolic_tracing() -> bool:
    """Tell whether the calling thread is in a symbolic trace, for which torch had one name before 2.9."""
    tracing: Callable[[], bool] | None = getattr(torch.fx._symbolic_trace, "is_fx_symbolic_tracing", None)
    return tracing() if tracing else torch.fx._symbolic_trace.is_fx_tracing() and not torch.compiler.is_compiling()


class Pause:
    """Where a trace stops."""

    def __init__(self) -> None:
        self.inside = threading.Event()
        self.go_on = threading.Event()

    def here(self) -> None:
        self.inside.set()
        if not self.go_on.wait(SECONDS):
            raise TimeoutError(f"the trace was not let go on within {SECONDS:g} s")


# By thread: only the thread that is to stop does, and once, whoever else runs the same model.
_pauses: dict[int, Pause] = {}


def pause() -> None:
    """Stop here, if the calling thread traces and has not stopped before."""
    stop = _pauses.pop(threading.get_ident(), None)
    if stop is not None:
        stop.here()


class Block(torch.nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.scale = torch.nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Any) -> Any:
        # Torch 2.6 exports with fake tensors, as others do, but has no other sign of it.
        if isinstance(x, torch.fx.Proxy) or is_exporting() or (TORCH < (2, 7) and isinstance(x, FakeTensor)):
            pause()
        return torch.relu(self.linear(x)) * self.scale * math.sqrt(4.0)


class Model(torch.nn.Module):
    """A module whose calls, attributes and functions from `math` all pass through what a trace patches."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = Block(width)
        self.rest = torch.nn.Sequential(Block(width), torch.nn.Tanh())
        self.bias = torch.nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(self.first(x)) + self.bias


class BlockTracer(torch.fx.Tracer):
    """Traces into blocks."""

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, torch.nn.Linear | torch.nn.Tanh)


def example(rows: int = 2, width: int = 4) -> torch.Tensor:
    return torch.linspace(-1.0, 1.0, rows * width).reshape(rows, width)


def _relu(x: torch.Tensor) -> torch.Tensor:
    pause()
    return x.clamp(min=0)


def _make_fx(**options: Any) -> Callable[[torch.nn.Module], torch.fx.Graph]:
    table = {torch.ops.aten.relu.default: _relu}
    return lambda model: make_fx(model, decomposition_table=table, **options)(example()).graph


TRACES: dict[str, Callable[[torch.nn.Module], torch.fx.Graph]] = {
    "symbolic_trace": lambda model: torch.fx.symbolic_trace(model).graph,
    "Tracer subclass": lambda model: BlockTracer().trace(model),
    "Tracer with autowrap_functions": lambda model: BlockTracer(autowrap_functions=(math.floor,)).trace(model),
    "make_fx": _make_fx(),
    "make_fx pre_dispatch": _make_fx(pre_dispatch=True),
    "make_fx fake": _make_fx(tracing_mode="fake", _allow_non_fake_inputs=True),
    "make_fx symbolic": _make_fx(tracing_mode="symbolic", _allow_non_fake_inputs=True),
    "export": lambda model: torch.export.export(model, (example(),), strict=False).graph,
}


@dataclass(frozen=True)
class Row:
    """What a node is; targets are compared by identity where they are functions."""

    op: str
    target: Any
    name: str
    args: str


def rows(graph: torch.fx.Graph) -> list[Row]:
    """Return the graph's nodes in order."""
    return [Row(node.op, node.target, node.name, f"{node.args} {node.kwargs}") for node in graph.nodes]


@dataclass
class Held:
    """A trace that has stopped; `graph` is there after it has ended."""

    stop: Pause
    thread: threading.Thread
    outcome: Any = None

    @property
    def graph(self) -> torch.fx.Graph:
        if isinstance(self.outcome, BaseException):
            raise AssertionError("the trace failed") from self.outcome  # noqa: TRY004  a test fails
        assert isinstance(self.outcome, torch.fx.Graph), "the trace has not ended"
        return self.outcome

    def finish(self) -> torch.fx.Graph:
        """Let the trace go on, wait for its end, and return its graph."""
        self.stop.go_on.set()
        self.thread.join(SECONDS)
        assert not self.thread.is_alive(), "the trace does not end"
        return self.graph


@contextlib.contextmanager
def held_trace(
    trace: Callable[[torch.nn.Module], torch.fx.Graph], model: torch.nn.Module, *, name: str = "tracer"
) -> Iterator[Held]:
    """Trace in a thread of its own, stopped in the middle until `finish` or the end of the block."""

    def run() -> None:
        _pauses[threading.get_ident()] = held.stop
        try:
            held.outcome = trace(model)
        except BaseException as error:
            held.outcome = error
        finally:
            _pauses.pop(threading.get_ident(), None)
            held.stop.inside.set()

    held = Held(Pause(), threading.Thread(target=run, name=name, daemon=True))
    held.thread.start()
    assert held.stop.inside.wait(SECONDS), "the trace does not get to where it is to stop"
    try:
        if not held.thread.is_alive() and isinstance(held.outcome, BaseException):
            raise AssertionError("the trace failed before it stopped") from held.outcome
        yield held
    finally:
        held.stop.go_on.set()
        held.thread.join(SECONDS)
