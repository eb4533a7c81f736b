"""A real server of a compiled model, with many clients at once: no errors, and one graph for each shape."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

import safecompile
from benchmarks.server import CLIENTS, answers_of, application, request, running, tiny_model, tokens
from safecompile import capture_context, statistics, thread_safe_compile, warmup
from safecompile.testing import CompileLimitError, no_compiles
from tests.helpers.backends import CountingBackend
from tests.helpers.counts import counted
from tests.helpers.threads import run_threads, wait_until
from tests.helpers.torch_version import lacks

for package in ("transformers", "fastapi", "uvicorn"):
    pytest.importorskip(package, reason="the server is of uvicorn and FastAPI, its model of transformers")
httpx = pytest.importorskip("httpx", reason="the server's clients")

pytestmark = pytest.mark.usefixtures("nothing_compiled")

# torch 2.6 breaks the graph in the middle of transformers' own wrappers.
one_graph = lacks((2, 7), "the model in one graph")

LENGTHS = (5, 8)
FURTHER = 200


class Load:
    """Clients that ask until the load is over, each for ids of its own; every other request has the newest length."""

    def __init__(self, lengths: tuple[int, ...], newest: Callable[[Load], int | None], clients: int = CLIENTS) -> None:
        self._lengths, self._newest, self._clients = lengths, newest, clients
        self._changed = threading.Condition()
        self._asked = self.answered = 0
        self._expected = answers_of(tiny_model(), lengths)

    def run(self, model: Any) -> None:
        """Serve the model until the load is over."""
        with torch.no_grad():
            context = capture_context()
        with running(application(model, context)) as url:
            run_threads(lambda client: self._ask(client, url), self._clients)

    def wait_for(self, further: int) -> None:
        """Wait until this many requests more are answered."""
        with self._changed:
            wanted = self.answered + further
            if not self._changed.wait_for(lambda: self.answered >= wanted, 60):
                raise TimeoutError(f"{wanted - self.answered} of {further} further requests were not answered")

    def _ask(self, client: int, url: str) -> None:
        with httpx.Client(base_url=url, timeout=60) as connection:
            while (length := self._next()) is not None:
                response = connection.post("/logits", json=tokens(length, client))
                response.raise_for_status()
                expected = self._expected[request(length, client)]
                torch.testing.assert_close(torch.tensor(response.json()), torch.tensor(expected))
                with self._changed:
                    self.answered += 1
                    self._changed.notify_all()

    def _next(self) -> int | None:
        with self._changed:
            newest = self._newest(self)
            if newest is None:
                return None
            self._asked += 1
            return self._lengths[newest if self._asked % 2 else self._asked // 2 % (newest + 1)]


def one_more_after_each(answers: int, lengths: int) -> Callable[[Load], int | None]:
    """Let a new length come after so many answers, whether or not the one before is compiled."""
    return lambda load: newest if (newest := load.answered // answers) < lengths else None


class HeldUntilAnswered(CountingBackend):
    """A backend that goes on when 200 further requests are answered."""

    def __init__(self) -> None:
        super().__init__()
        self.load: Load
        self.through = 0

    def record(self, gm: torch.fx.GraphModule) -> None:
        super().record(gm)
        self.load.wait_for(FURTHER)
        self.through += 1


@one_graph
def test_each_shape_is_compiled_once_while_new_ones_come() -> None:
    backend = CountingBackend()
    model = thread_safe_compile(tiny_model(), backend=backend, dynamic=False, recompile_limit=len(LENGTHS))
    load = Load(LENGTHS, one_more_after_each(32, len(LENGTHS)))
    load.run(model)
    assert load.answered >= 32 * len(LENGTHS)
    assert backend.count == len(LENGTHS)
    assert (counted(type(model).forward).compiles, counted(type(model).forward).eager_runs) == (len(LENGTHS), 0)


@lacks((2, 7), "a frame that runs eagerly this once")
def test_requests_are_answered_while_each_new_shape_is_compiled() -> None:
    backend = HeldUntilAnswered()
    model = thread_safe_compile(tiny_model(), backend=backend, dynamic=False, recompile_limit=2, when_compiling="eager")
    backend.load = Load(LENGTHS[:2], lambda _: backend.through if backend.through < 2 else None)
    backend.load.run(model)
    assert backend.load.answered >= 2 * FURTHER
    assert backend.count == counted(type(model).forward).compiles == 2
    assert counted(type(model).forward).eager_runs >= FURTHER


@one_graph
def test_control_calls_that_wait_let_no_request_through() -> None:
    backend = CountingBackend(gated=True)
    model = thread_safe_compile(tiny_model(), backend=backend, dynamic=False)
    load = Load(LENGTHS[:1], lambda load: 0 if load.answered < CLIENTS else None)
    serving = threading.Thread(target=load.run, args=(model,))
    serving.start()
    try:
        wait_until(lambda: len(statistics().lock.waiters) == CLIENTS - 1)
        assert load.answered == 0
    finally:
        backend.release.set()
        serving.join(60)
    assert load.answered >= CLIENTS
    assert backend.count == 1


# Before torch 2.12 such calls of several threads leave their `dynamic=` in the configuration.
@torch._dynamo.config.patch(automatic_dynamic_shapes=True, assume_static_by_default=True)
def test_control_with_torch_alone_requests_compile_one_shape_several_times() -> None:
    safecompile.uninstall()
    clients = 3  # each of them compiles

    class Backend(CountingBackend):
        def record(self, gm: torch.fx.GraphModule) -> None:
            super().record(gm)
            if self.count == 1:
                wait_until(lambda: threads_in("convert_frame.py") == clients)

    backend = Backend()
    model = torch.compile(tiny_model(), backend=backend, dynamic=False)
    Load(LENGTHS[:1], lambda load: 0 if load.answered < clients else None, clients).run(model)
    assert backend.count > 1


def threads_in(file: str) -> int:
    """Return how many threads are inside a function of this file."""

    def inside(frame: FrameType | None) -> bool:
        while frame is not None and not frame.f_code.co_filename.endswith(file):
            frame = frame.f_back
        return frame is not None

    return sum(inside(frame) for frame in sys._current_frames().values())


def test_after_warmup_a_load_compiles_nothing_on_any_thread() -> None:
    model = thread_safe_compile(tiny_model(), backend="eager", dynamic=False, recompile_limit=2)
    with torch.no_grad():
        for length in LENGTHS[:2]:
            warmup(model, (torch.tensor([tokens(length)]),))
    load = Load(LENGTHS[:2], one_more_after_each(64, 2))
    with no_compiles():
        load.run(model)


def test_control_without_warmup_the_load_compiles() -> None:
    model = thread_safe_compile(tiny_model(), backend="eager", dynamic=False)
    with pytest.raises(CompileLimitError, match=r"worker thread"), no_compiles():
        Load(LENGTHS[:1], one_more_after_each(1, 1)).run(model)
