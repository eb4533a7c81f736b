"""Dynamo backends that count what they compile, from any thread, and can hold a compile until told to go on."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch


@dataclass(frozen=True)
class Compile:
    """One call of the backend."""

    thread_name: str
    graph: torch.fx.GraphModule


class CountingBackend:
    """Run graphs as they are, and record each compile.

    With `gated=True` every compile sets `entered` and then waits until the test sets `release`, so that a test can do
    something while a thread is inside a compile. A gate that nobody opens within `limit` seconds is an error in the
    compiling thread.
    """

    def __init__(self, *, gated: bool = False, limit: float = 60.0) -> None:
        self.entered = threading.Event()
        self.release = threading.Event()
        self._gated = gated
        self._limit = limit
        self._lock = threading.Lock()
        self._compiles: list[Compile] = []

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.record(gm)
        return gm.forward

    def record(self, gm: torch.fx.GraphModule) -> None:
        """Count a compile, and hold it while the gate is closed."""
        with self._lock:
            self._compiles.append(Compile(threading.current_thread().name, gm))
        self.entered.set()
        if self._gated and not self.release.wait(self._limit):
            raise TimeoutError(f"the compile was not released within {self._limit:g} s")

    @property
    def compiles(self) -> list[Compile]:
        """The compiles so far, in the order in which they began."""
        with self._lock:
            return list(self._compiles)

    @property
    def count(self) -> int:
        """How many compiles have begun."""
        return len(self.compiles)

    @property
    def thread_names(self) -> list[str]:
        """The names of the compiling threads, one for each compile."""
        return [compile_.thread_name for compile_ in self.compiles]

    @property
    def graphs(self) -> list[torch.fx.GraphModule]:
        """The compiled graphs."""
        return [compile_.graph for compile_ in self.compiles]


class AotCountingBackend:
    """Run the graphs that AOTAutograd makes as they are; count forward and backward compiles separately.

    A graph that needs no gradient counts as a forward. `gated_forward` and `gated_backward` are as `gated` above, with
    the events on `forward` and `backward`.
    """

    def __init__(self, *, gated_forward: bool = False, gated_backward: bool = False, limit: float = 60.0) -> None:
        from torch._dynamo.backends.common import aot_autograd

        self.forward = CountingBackend(gated=gated_forward, limit=limit)
        self.backward = CountingBackend(gated=gated_backward, limit=limit)
        self._compile = aot_autograd(fw_compiler=_boxed(self.forward), bw_compiler=_boxed(self.backward))

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return self._compile(gm, example_inputs)


def _boxed(backend: CountingBackend) -> Callable[..., Any]:
    from torch._functorch._aot_autograd.utils import make_boxed_func

    def compile_graph(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return make_boxed_func(backend(gm, example_inputs))

    return compile_graph
