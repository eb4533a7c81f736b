"""Everything at once: threads compile, trace, export, train and reset, and each result is the single thread's."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import safecompile
from safecompile import fx_trace_lock, thread_safe_compile
from tests.helpers import stress_program
from tests.helpers.subprocess_run import IsolatedResult, run_forked, run_isolated
from tests.helpers.threads import run_threads
from tests.helpers.torch_version import TORCH

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SECONDS = float(os.environ.get("SAFECOMPILE_STRESS_SECONDS", "60"))
SEED = int(os.environ.get("SAFECOMPILE_STRESS_SEED") or random.SystemRandom().randrange(2**32))
# For the start and the references, and until a hang is reported.
MORE_SECONDS = 120.0

KINDS = {
    "compiled",
    "eager",
    "export",
    "failing backend",
    "graph breaks",
    "make_fx",
    "new shapes",
    "optimizer",
    "reset",
    "shared failing backend",
    "symbolic trace",
}


def stress(how: str, seconds: float) -> IsolatedResult:
    arguments = [how, str(seconds), str(SEED)]
    program = Path(stress_program.__file__)
    return run_isolated(program, arguments, timeout=seconds + MORE_SECONDS, env={"OMP_NUM_THREADS": "1"})


def faults(result: IsolatedResult) -> list[str]:
    """Return what went wrong in a run."""
    if result.hung or result.rc != 0:
        return [f"the program {'hung' if result.hung else f'ended with {result.rc}'}:\n{result.stderr}"]
    summary = json.loads(result.stdout)
    return [*summary["wrong"], *summary["errors"], *summary["left patched"]]


@pytest.mark.hang_timeout(SECONDS + MORE_SECONDS + 60)
def test_mixed_work_of_8_threads_gives_the_single_threads_results_and_the_injected_errors_only() -> None:
    result = stress("library", SECONDS)
    found = faults(result)
    assert not found, f"{len(found)} faults with SAFECOMPILE_STRESS_SEED={SEED}:\n" + "\n\n".join(
        [*found, result.stdout]
    )
    summary: dict[str, Any] = json.loads(result.stdout)
    assert set(summary["operations"]) == KINDS, f"SAFECOMPILE_STRESS_SEED={SEED}: {summary}"
    assert summary["injected"] >= summary["operations"]["failing backend"] > 0


@pytest.mark.hang_timeout(MORE_SECONDS + 60)
def test_control_mixed_work_of_8_threads_fails_with_torch_alone() -> None:
    assert faults(stress("stock", 5)), f"SAFECOMPILE_STRESS_SEED={SEED}"


# --- what the stress has found


def until_a_reset_waits() -> None:
    while safecompile.statistics().installed:
        pass


@pytest.mark.parametrize("where", ["the rest of a call", "a nested call"])
def test_a_call_in_flight_compiles_a_new_shape_while_a_reset_waits_for_its_end(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fx_trace_lock, "limit", 2.0)
    in_flight, nested = threading.Event(), thread_safe_compile(lambda x: x - 1, backend="eager", dynamic=False)

    @torch._dynamo.disable
    def stop(rows: int) -> None:
        if rows == 3:
            in_flight.set()
            until_a_reset_waits()
            if where == "a nested call":
                for new in (2, 3):
                    assert torch.equal(nested(torch.ones(new)), torch.zeros(new))

    @thread_safe_compile(backend="eager", dynamic=False)
    def f(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        stop(len(x))
        return x * 2

    def reset() -> None:
        assert in_flight.wait(30)
        safecompile.reset()

    f(torch.ones(2))
    result: Any = run_threads([lambda: f(torch.ones(3)), reset])[0]
    assert torch.equal(result, torch.full((3,), 4.0))


OVERLAPPING = """
import sys, threading, torch, safecompile
from tests.helpers.backends import CountingBackend
from tests.helpers.device_guard import ask_for_the_device_guard
from tests.helpers.threads import gather_threads

ask_for_the_device_guard()
how, company = sys.argv[1:]
first_inside, first_done, second_inside = threading.Event(), threading.Event(), threading.Event()

class First(torch.nn.Module):
    def forward(self, x):
        return x * first()

class Second(torch.nn.Module):
    def forward(self, x):
        return x * second()

@torch.compiler.assume_constant_result
def first():
    first_inside.set()
    second_inside.wait(2)  # for nothing, where they wait for each other
    return True  # torch 2.6 cannot take a number

@torch.compiler.assume_constant_result
def second():
    second_inside.set()
    first_done.wait(2)
    return True

def export_first():
    try:
        torch.export.export(First(), (torch.ones(2),), strict=True)
    finally:
        first_done.set()

def second_thread():
    assert first_inside.wait(30)
    if company == "export":
        torch.export.export(Second(), (torch.ones(2),), strict=True)
    else:
        safecompile.thread_safe_compile(Second(), backend="eager")(torch.ones(2))

if how == "library":
    safecompile.install()
outcomes = gather_threads([export_first, second_thread])
backend = CountingBackend()
torch.compile(torch.fx.symbolic_trace(torch.nn.Linear(2, 2)), backend=backend)(torch.ones(2))
if backend.count == 0:
    sys.exit(3)
assert outcomes == [None, None], outcomes
"""


@pytest.mark.parametrize("company", ["compile", "export"])
def test_traced_modules_are_compiled_after_a_strict_export_that_overlapped(company: str) -> None:
    run_forked(OVERLAPPING, ["library", company]).check()


def test_control_traced_modules_are_not_compiled_after_strict_exports_of_torch_alone_overlapped() -> None:
    result = run_forked(OVERLAPPING, ["alone", "export"])
    # With torch 2.6 and 2.8 the exports themselves fail; now and then they end the process (seen on 2.11).
    assert result.rc in {3 if TORCH >= (2, 9) else 1, -signal.SIGSEGV}, result


FREED_CODE = """
import faulthandler, sys, threading, weakref, torch, safecompile
from torch.utils._traceback import CapturedTraceback

if sys.argv[1] == "library":
    safecompile.install()
freeing = threading.Event()

def freed(_):
    faulthandler.dump_traceback_later(3, exit=True)
    freeing.set()
    threading.Event().wait(0.2)  # as any bytecode can: the interpreter switches threads

namespace = {"extract": CapturedTraceback.extract}
exec("def function(): return extract()", namespace)
stack = namespace["function"]()
watch = weakref.ref(namespace["function"].__code__, freed)
del namespace["function"]

def extract():
    freeing.wait(5)
    CapturedTraceback.extract()

other = threading.Thread(target=extract, daemon=True)
other.start()
del stack  # torch frees the code with a mutex held; the other waits for that, and holds the interpreter lock
other.join()
faulthandler.cancel_dump_traceback_later()
"""


@pytest.mark.xfail(
    strict=True,
    reason="torch frees the code of the stacks that it keeps with a mutex held; the library holds what Dynamo compiled, "
    "but not any code that has a weak reference with a callback",
)
def test_a_stack_that_torch_has_kept_is_freed_while_another_thread_takes_one() -> None:
    run_forked(FREED_CODE, ["library"]).check()


def test_control_a_stack_that_torch_alone_frees_while_another_thread_takes_one_hangs() -> None:
    result = run_forked(FREED_CODE, ["alone"])
    assert result.rc == 1 and "Timeout (0:00:03)!" in result.stderr


ANOMALY = """
import faulthandler, sys, threading, torch, safecompile, torch.fx.traceback
from torch.autograd import Function, detect_anomaly

if sys.argv[1] == "library":
    safecompile.install()
parameter = torch.ones(2, requires_grad=True)
tracing, go_on, asked = threading.Event(), threading.Event(), threading.Event()
enter, format_stack, nodes = detect_anomaly.__enter__, torch.fx.traceback.format_stack, []

def entered(self):  # by AOTAutograd, whose trace stops here
    enter(self)
    tracing.set()
    go_on.wait(2)

def slow():
    if threading.current_thread().name == "eager":
        nodes.append("product" if not nodes else "parameter")
    if nodes[-1:] == ["parameter"]:  # made with the parameter's mutex held
        faulthandler.dump_traceback_later(3, exit=True)
        asked.set()
        threading.Event().wait(0.2)  # as any bytecode can: the interpreter switches threads
    return format_stack()

class Twice(Function):  # what AOTAutograd makes is such a function
    @staticmethod
    def forward(ctx, x):
        return x * 2

def compiling():
    torch.compile(lambda x: x.sin(), backend="aot_eager")(torch.ones(2, requires_grad=True))
    tracing.set()

def eager():
    tracing.wait()
    parameter * 2
    asked.set()

def other():
    asked.wait()
    Twice.apply(parameter)
    go_on.set()

detect_anomaly.__enter__, torch.fx.traceback.format_stack = entered, slow
threads = [threading.Thread(target=work, name=work.__name__, daemon=True) for work in (compiling, eager, other)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not nodes, nodes
"""


def test_threads_that_use_one_parameter_do_not_meet_the_anomaly_mode_of_another_threads_compile() -> None:
    run_forked(ANOMALY, ["library"]).check()


def test_control_threads_that_use_one_parameter_beside_a_compile_of_torch_alone_hang() -> None:
    result = run_forked(ANOMALY, ["alone"])
    assert result.rc == 1 and "Timeout (0:00:03)!" in result.stderr
