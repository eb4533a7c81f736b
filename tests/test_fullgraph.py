"""The count of compiled frames by which fullgraph=True finds out that nothing was compiled."""

from __future__ import annotations

import threading

import pytest
import torch

from safecompile import thread_safe_compile
from tests.helpers.backends import CountingBackend
from tests.helpers.subprocess_run import run_isolated
from tests.helpers.threads import run_threads, switch_interval

SCHEDULE = """
import threading
import torch
import safecompile
from tests.helpers.threads import run_threads

compile = {compile}
inside, second, ended = threading.Event(), threading.Event(), threading.Event()

def backend(graph, inputs):
    if threading.current_thread().name == "worker-1":
        second.set()  # its count has started, and no frame of it is counted yet
        assert ended.wait(60)
    def run(*args):
        if threading.current_thread().name == "worker-0":
            inside.set()
            assert second.wait(60)
        return graph.forward(*args)
    return run

def work(x):
    return x.sin() + 1

f = compile(work, backend=backend, fullgraph=True, dynamic=False)
f(torch.ones(2))

def first():
    try:
        f(torch.ones(2))  # its frame is counted before `inside`
    finally:
        ended.set()

def other():
    assert inside.wait(60)
    f(torch.ones(3))

run_threads([first, other])
"""


def test_a_fullgraph_call_beside_others_is_not_taken_for_one_that_compiled_nothing() -> None:
    run_isolated(SCHEDULE.format(compile="safecompile.thread_safe_compile")).check()


def test_control_torch_alone_takes_it_for_one_that_compiled_nothing() -> None:
    assert "found no compiled frames" in run_isolated(SCHEDULE.format(compile="torch.compile")).stderr


@pytest.mark.usefixtures("nothing_compiled")
def test_fullgraph_calls_of_many_threads_go_on_at_once() -> None:
    f = thread_safe_compile(lambda x: x.sin() + 1, backend=CountingBackend(), fullgraph=True)
    x = torch.ones(2)

    def work(_: int) -> None:
        for _ in range(300):
            assert torch.equal(f(x), x.sin() + 1)

    with switch_interval(1e-6):
        run_threads(work, 8)


@pytest.mark.usefixtures("nothing_compiled")
def test_a_fullgraph_call_that_compiles_nothing_is_still_an_error_for_one_thread() -> None:
    f = thread_safe_compile(lambda x: x + 1, backend="eager", fullgraph=True)
    with torch.compiler.set_stance("force_eager"):
        f(torch.ones(2))
    assert threading.active_count() >= 1
    with torch._dynamo.config.patch(disable=True), pytest.raises(RuntimeError, match="found no compiled frames"):
        f(torch.ones(2))
