"""The count of compiled frames by which fullgraph=True finds out that nothing was compiled."""

from __future__ import annotations

import pytest
import torch

from safecompile import thread_safe_compile
from tests.helpers.backends import CountingBackend
from tests.helpers.subprocess_run import run_forked
from tests.helpers.threads import run_threads, switch_interval
from tests.helpers.torch_version import TORCH, lacks, repaired

counted = lacks((2, 13), "the count of compiled frames")

COUNT = """
import torch._dynamo.eval_frame as eval_frame
from tests.helpers.threads import run_threads

assert eval_frame.set_fullgraph_compiled_frame_count(0) == -1  # this thread's call begins
begins = run_threads([lambda: eval_frame.set_fullgraph_compiled_frame_count(0)])[0]
assert begins == {wanted}, begins
"""


@counted
def test_each_thread_has_a_count_of_its_own() -> None:
    run_forked(f"import safecompile; safecompile.install()\n{COUNT.format(wanted=-1)}").check()


@counted
@repaired((2, 15), "the count of compiled frames is the process's")
def test_control_torch_alone_has_one_count_for_the_process() -> None:
    run_forked(COUNT.format(wanted=0)).check()


@pytest.mark.usefixtures("nothing_compiled")
def test_fullgraph_calls_of_many_threads_go_on_at_once() -> None:
    f = thread_safe_compile(lambda x: x.sin() + 1, backend=CountingBackend(), fullgraph=True)
    x = torch.ones(2)

    def work(_: int) -> None:
        for _ in range(300):
            assert torch.equal(f(x), x.sin() + 1)

    with switch_interval(1e-6):
        run_threads(work, 8)


BESIDE = """
import sys, threading
import torch
from safecompile import install
from tests.helpers.backends import CountingBackend
from tests.helpers.device_guard import ask_for_the_device_guard

ask_for_the_device_guard()
if sys.argv[1] == "library":
    install()
inside, leave = threading.Event(), threading.Event()

def waits(graph, inputs):
    def run(*args):
        inside.set()
        assert leave.wait(60)
        return graph.forward(*args)
    return run

def breaks(x):
    x = x + 1
    torch._dynamo.graph_break()
    return x * 2

x = torch.ones(2)
whole = threading.Thread(target=torch.compile(lambda x: x.sin(), backend=waits, fullgraph=True), args=(x,))
whole.start()
assert inside.wait(60)
backend = CountingBackend()
assert torch.equal(torch.compile(breaks, backend=backend)(x), breaks(x))
leave.set()
whole.join()
print(backend.count)
"""


@pytest.mark.parametrize(
    "way",
    [
        "library",
        pytest.param(
            "alone",
            marks=pytest.mark.xfail(
                (2, 9) <= TORCH < (2, 15),
                strict=True,
                reason="from torch 2.9 to 2.14 a fullgraph call decides for the process that no more is compiled",
            ),
        ),
    ],
)
def test_what_follows_a_break_is_compiled_beside_a_fullgraph_call_of_another_thread(way: str) -> None:
    assert run_forked(BESIDE, [way]).check().stdout.split() == ["2"]


@counted
@pytest.mark.usefixtures("nothing_compiled")
def test_a_fullgraph_call_that_compiles_nothing_is_still_an_error_for_one_thread() -> None:
    f = thread_safe_compile(lambda x: x + 1, backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(disable=True), pytest.raises(RuntimeError, match="found no compiled frames"):
        f(torch.ones(2))
