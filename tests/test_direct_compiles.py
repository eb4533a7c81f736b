"""Graphs that several threads give to Inductor directly, without Dynamo and its lock (E3)."""

from __future__ import annotations

import pytest

from tests.helpers.subprocess_run import IsolatedResult, run_isolated

PROGRAM = """
import sys, threading, torch
from torch._inductor.compile_fx import compile_fx
from tests.helpers.threads import run_threads

if sys.argv[1] == "library":
    import safecompile
    safecompile.install()
together = threading.Barrier(4)

def compile_and_run(number):
    together.wait(60)
    graph = torch.fx.symbolic_trace(lambda x: (x * (number + 1)).sin())
    x = torch.linspace(-1, 1, 4 + number)
    (got,) = torch.utils._pytree.tree_leaves(compile_fx(graph, [x])(x))
    torch.testing.assert_close(got, (x * (number + 1)).sin())

run_threads(compile_and_run, 4, timeout=100)
"""


def ended(how: str) -> IsolatedResult:
    return run_isolated(PROGRAM, [how], timeout=120, env={"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"})


@pytest.mark.inductor
@pytest.mark.hang_timeout(150)
def test_graphs_that_threads_give_to_inductor_are_compiled_one_after_the_other() -> None:
    ended("library").check()


@pytest.mark.inductor
@pytest.mark.hang_timeout(400)
def test_control_threads_that_give_graphs_to_inductor_fail_with_torch_alone() -> None:
    result = ended("alone")
    for _ in range(2):  # a loaded machine may let them compile one after the other
        result = result if result.rc != 0 else ended("alone")
    assert result.rc != 0
    errors = ("Duplicate pattern", "CURRENT_PATCHER", "prior should be empty when entering ConfigPatch")
    assert any(error in result.stderr for error in errors), result.stderr
