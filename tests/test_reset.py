"""`reset`: it waits for calls in flight and holds new ones, instead of freeing what they run (C2)."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import safecompile
from safecompile import PatchesInUseError, thread_safe_compile
from safecompile._patches import patches
from tests.helpers.backends import CountingBackend
from tests.helpers.subprocess_run import IsolatedResult, run_forked
from tests.helpers.threads import run_threads, wait_until
from tests.helpers.torch_version import repaired

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

RESETS = [safecompile.reset, torch.compiler.reset, torch._dynamo.reset]


@pytest.mark.parametrize("reset", RESETS)
def test_everything_is_compiled_again_after_a_reset(reset: Any) -> None:
    backend = CountingBackend()
    f = thread_safe_compile(lambda x: x + 1, backend=backend)
    f(torch.ones(2))
    reset()
    f(torch.ones(2))
    assert backend.count == 2


@pytest.mark.parametrize("reset", RESETS)
def test_a_reset_inside_a_guarded_call_is_refused(reset: Any) -> None:
    @torch._dynamo.disable
    def inside() -> None:
        with pytest.raises(PatchesInUseError, match="inside a guarded call"):
            reset()

    @thread_safe_compile(backend="eager")
    def f(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        inside()
        return x * 2

    safecompile.install()
    assert torch.equal(f(torch.ones(2)), torch.full((2,), 4.0))


def test_a_reset_waits_for_a_call_in_flight_and_holds_a_new_one() -> None:
    entered, leave, resetting = threading.Event(), threading.Event(), threading.Event()
    order: list[str] = []

    @torch._dynamo.disable
    def stop() -> None:
        entered.set()
        assert leave.wait(30)
        nested(torch.ones(2))  # part of the call in flight: it is not held
        order.append("call ends")

    nested = thread_safe_compile(lambda x: x - 1, backend="eager")

    @thread_safe_compile(backend="eager")
    def f(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        stop()
        return x * 2

    warm = thread_safe_compile(lambda x: x * 3, backend="eager")
    warm(torch.ones(2))
    nested(torch.ones(2))

    def reset() -> None:
        assert entered.wait(30)
        resetting.set()
        safecompile.reset()
        order.append("reset ends")

    def call() -> None:
        assert resetting.wait(30)
        while safecompile.statistics().installed:  # until the reset has begun, calls go on
            warm(torch.ones(2))
        leave.set()
        assert torch.equal(warm(torch.ones(2)), torch.full((2,), 3.0))
        order.append("held call ends")

    result: Any = run_threads([lambda: f(torch.ones(2)), reset, call])[0]
    assert torch.equal(result, torch.full((2,), 4.0))
    assert order[0] == "call ends" and set(order[1:]) == {"reset ends", "held call ends"}


def test_a_call_that_has_just_seen_no_reset_does_not_install_in_the_middle_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered, returned = threading.Event(), threading.Event()
    warm = thread_safe_compile(lambda x: x + 1, backend="eager")
    warm(torch.ones(2))

    class OnceFree:
        """The lock that a reset has, as a call saw it a moment before."""

        def __init__(self, lock: Any) -> None:
            self.acquire, self.release, self.lock, self.seen = lock.acquire, lock.release, lock, [False]

        def locked(self) -> bool:
            return self.seen.pop() if self.seen else self.lock.locked()

    @torch._dynamo.disable
    def stop() -> None:
        entered.set()
        wait_until(lambda: patches._held or returned.is_set())
        assert not returned.is_set(), "the call did not wait for the reset that waits for this one"

    @thread_safe_compile(backend="eager")
    def in_flight(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        stop()
        return x * 2

    def reset() -> None:
        assert entered.wait(30)
        safecompile.reset()

    def call() -> None:
        wait_until(lambda: not safecompile.statistics().installed)
        stale = OnceFree(patches._reset)
        monkeypatch.setattr(patches, "_reset", stale)
        warm(torch.ones(2))
        returned.set()
        assert not stale.seen

    run_threads([lambda: in_flight(torch.ones(2)), reset, call])


PROGRAM = """
    import sys, threading, torch, safecompile
    from safecompile import thread_safe_compile
    if sys.argv[1] == "library":
        safecompile.install()
    sys.setswitchinterval(1e-5)
    compile_it = thread_safe_compile if sys.argv[1] == "library" else torch.compile
    calls = [compile_it(eval(f"lambda x: (x + {i}).sin()"), backend="eager") for i in range(4)]
    done, x = threading.Event(), torch.ones(3)
    def work():
        while not done.is_set():
            for i, call in enumerate(calls):
                assert torch.equal(call(x), (x + i).sin())
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(int(sys.argv[2])):
        torch._dynamo.reset()
        calls[0](x)
    done.set()
    for thread in threads:
        thread.join()
"""


def run(how: str, resets: int) -> IsolatedResult:
    return run_forked(PROGRAM, [how, str(resets)], timeout=100)


def test_resets_beside_running_calls_do_no_harm() -> None:
    run("library", 30).check()


def test_control_resets_beside_running_calls_crash_with_torch_alone() -> None:
    assert any(run("alone", 3000).rc < 0 for _ in range(5))


TIMED = """
import sys, torch, safecompile
from torch._dynamo.utils import dynamo_timed

if sys.argv[1] == "library":
    safecompile.install()

class Resets(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        with dynamo_timed("backward"):  # as the compiled backwards of torch 2.8 and older are
            torch._dynamo.reset()
        return gradient * 2

x = torch.ones(2, requires_grad=True)
Resets.apply(x).sum().backward()
assert torch.equal(x.grad, torch.full((2,), 2.0))
"""


def test_a_reset_does_not_fail_what_is_being_timed() -> None:
    run_forked(TIMED, ["library"]).check()


@repaired((2, 9), "a reset empties the times that are being taken")
def test_control_with_torch_alone_it_does() -> None:
    assert "KeyError" in run_forked(TIMED, ["alone"]).stderr
