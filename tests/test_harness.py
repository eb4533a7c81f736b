"""The harness has to fail when it should: a test that hangs, a worker that raises."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

import pytest
import torch

from tests.helpers.backends import AotCountingBackend, CountingBackend
from tests.helpers.subprocess_run import IsolatedResult, run_forked, run_isolated
from tests.helpers.threads import ThreadsHangError, WorkersFailedError, gather_threads, run_threads, switch_interval

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_results_come_in_order() -> None:
    assert run_threads(lambda index: index * 10, 4) == [0, 10, 20, 30]
    assert run_threads([lambda: "a", lambda: "b"]) == ["a", "b"]


def test_workers_run_at_the_same_time() -> None:
    together = threading.Barrier(8)
    run_threads(lambda _: together.wait(30), 8)


def fail_at_two(index: int) -> int:
    if index == 2:
        raise ValueError("two is refused")
    return index


def test_a_worker_that_raises_fails_with_its_traceback() -> None:
    with pytest.raises(
        WorkersFailedError, match=r"(?s)1 of 4 workers failed.*worker-2.*in fail_at_two.*two is refused"
    ):
        run_threads(fail_at_two, 4)


def test_exceptions_can_be_gathered() -> None:
    outcomes = gather_threads(fail_at_two, 4)
    assert [type(outcome) for outcome in outcomes] == [int, int, ValueError, int]


def test_threads_that_hang_fail_with_all_stacks() -> None:
    never = threading.Event()

    def wait_for_ever(index: int) -> None:
        if index == 0:
            raise ValueError("the cause")
        never.wait()

    try:
        with pytest.raises(ThreadsHangError, match=r"(?s)worker-1 still running.*the cause.*in wait_for_ever"):
            run_threads(wait_for_ever, 2, timeout=0.2)
    finally:
        never.set()


def test_the_switch_interval_is_restored() -> None:
    before = sys.getswitchinterval()
    with switch_interval(1e-6):
        assert sys.getswitchinterval() < before
    assert sys.getswitchinterval() == before


def test_an_isolated_program_hands_back_what_it_did(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import os, sys; print(sys.argv[1], os.environ['GIVEN']); sys.exit(3)")
    result = run_isolated(program, ["argument"], env={"GIVEN": "value"})
    assert (result.rc, result.stdout, result.hung) == (3, "argument value\n", False)
    with pytest.raises(AssertionError, match="ended with 3"):
        result.check()


def test_a_forked_program_hands_back_what_it_did_and_leaves_nothing_for_the_next() -> None:
    program = """
    import os, sys, threading
    import torch
    assert __name__ == "__main__" and threading.active_count() == 1
    assert torch.cuda.is_available() or len(os.listdir("/proc/self/task")) == 1  # with a GPU there is one more
    assert not hasattr(torch, "left_behind")
    torch.left_behind = True
    print(sys.argv[1:])
    print("error", file=sys.stderr)
    {}
    """
    for how, code in (("sys.exit(3)", 3), ("os._exit(4)", 4), ("raise KeyError", 1), ("os.abort()", -6), ("", 0)):
        result = run_forked(program.format(f"sys.stdout.flush(); {how}"), ["argument"])
        assert (result.rc, result.stdout, result.hung) == (code, "['argument']\n", False), result.stderr
        assert result.stderr.startswith("error\n")


@pytest.mark.parametrize("run", [run_isolated, run_forked])
def test_an_isolated_program_that_hangs_shows_its_stacks(run: Callable[..., IsolatedResult]) -> None:
    result = run(
        """
        import threading

        def wait_for_ever():
            threading.Event().wait()

        threading.Thread(target=wait_for_ever, daemon=True).start()
        threading.Event().wait()
        """,
        timeout=1.0,
    )
    assert result.hung
    assert "in wait_for_ever" in result.stderr


def test_a_test_that_hangs_ends_the_run_with_all_stacks(tmp_path: Path) -> None:
    test_file = tmp_path / "test_it.py"
    test_file.write_text(
        """
import threading, pytest

@pytest.fixture
def failing_then_hanging():
    yield
    threading.Event().wait()

@pytest.mark.hang_timeout(1)
def test_hangs(failing_then_hanging):
    print("captured")
    assert False
"""
    )
    result = run_isolated(
        "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))",
        ["-p", "tests.helpers.hang_timeout", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(test_file)],
    )
    assert (result.rc, result.hung) == (1, False)
    assert "Timeout (0:00:01)!" in result.stderr
    assert "in failing_then_hanging" in result.stderr


def test_a_gated_backend_holds_the_compile(fresh_dynamo: None) -> None:
    backend = CountingBackend(gated=True)
    compiled = torch.compile(lambda x: x + 1, backend=backend)

    def open_the_gate() -> bool:
        inside = backend.entered.wait(30)
        backend.release.set()
        return inside

    result, inside = run_threads([lambda: compiled(torch.ones(2)), open_the_gate])
    assert inside
    assert torch.equal(result, torch.full((2,), 2.0))
    assert (backend.count, backend.thread_names) == (1, ["worker-0"])
    assert len(backend.graphs[0].graph.nodes) == 3


def test_forward_and_backward_compiles_are_counted(fresh_dynamo: None) -> None:
    backend = AotCountingBackend()
    compiled = torch.compile(lambda x: x.sin().sum(), backend=backend)
    x = torch.ones(3, requires_grad=True)
    loss = compiled(x)
    assert (backend.forward.count, backend.backward.count) == (1, 0)
    loss.backward()
    assert (backend.forward.count, backend.backward.count) == (1, 1)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.ones(3).cos())
