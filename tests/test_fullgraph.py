"""The count of compiled frames by which fullgraph=True finds out that nothing was compiled."""

from __future__ import annotations

import pytest
import torch

from safecompile import thread_safe_compile
from tests.helpers.backends import CountingBackend
from tests.helpers.subprocess_run import run_forked
from tests.helpers.threads import run_threads, switch_interval
from tests.helpers.torch_version import lacks, repaired

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


@counted
@pytest.mark.usefixtures("nothing_compiled")
def test_a_fullgraph_call_that_compiles_nothing_is_still_an_error_for_one_thread() -> None:
    f = thread_safe_compile(lambda x: x + 1, backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(disable=True), pytest.raises(RuntimeError, match="found no compiled frames"):
        f(torch.ones(2))
