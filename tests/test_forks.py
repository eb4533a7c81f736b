"""A child forked at any moment can compile, trace, set a stance and reset (D2; pytorch#198246)."""

from __future__ import annotations

import sys

import pytest

from tests.helpers.subprocess_run import run_forked, run_isolated

PROGRAM = """
import faulthandler, itertools, os, random, sys, threading, traceback
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # CUDA can be used in one of parent and child only
import torch
from torch.fx.experimental.proxy_tensor import make_fx
import safecompile
from tests.helpers.threads import switch_interval

library, children, seconds = sys.argv[1] == "library", int(sys.argv[2]), float(sys.argv[3])
# Autograd starts its threads now. Later, torch's CUDA build would start one for a device that is not there, and then
# the children could have no backward.
torch.ones(1, requires_grad=True).sum().backward()
if library:
    safecompile.install()
reset = safecompile.reset if library else int
numbers, model = itertools.count(1), torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
stop = threading.Event()

def fresh(number):
    namespace = {}
    exec(f"def function(x): return (x * {number} + 1).sin()", namespace)
    return namespace["function"]

def compiles():
    x = torch.ones(3, requires_grad=True)
    function = fresh(next(numbers))
    result = torch.compile(function, backend="aot_eager")(x)
    result.sum().backward()
    assert torch.equal(result, function(x))

def traces():
    torch.fx.symbolic_trace(model)
    make_fx(lambda x: x.sin())(torch.ones(2))

# torch 2.6 takes a reference to None away with each stance, and the process has not many.
nones = [None] * 2_000_000

def takes_a_stance():
    with torch.compiler.set_stance("force_eager"):
        pass

KINDS = (compiles, traces, takes_a_stance, reset)
compiles()  # imports what it needs; a fork while a module is being imported is Python's own affair

def over_and_over(do):
    while not stop.is_set():
        do()

threads = [threading.Thread(target=over_and_over, args=(kind,), daemon=True) for kind in KINDS]
failed = 0
with switch_interval(1e-5):
    for thread in threads:
        thread.start()
    for _ in range(children):
        stop.wait(random.random() * 0.05)
        child = os.fork()
        if not child:
            faulthandler.dump_traceback_later(seconds, exit=True)
            try:
                for kind in KINDS:
                    kind()
            except BaseException:
                traceback.print_exc()
                os._exit(2)
            os._exit(0)
        failed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
print(failed, flush=True)
os._exit(0)
"""


IN_A_PROPERTY = """
import functools, os, sys, threading
import safecompile

inside, leave = threading.Event(), threading.Event()

class Source:
    @functools.cached_property
    def name(self):
        inside.set()
        leave.wait()

if sys.argv[1] == "library":
    safecompile.install()
thread = threading.Thread(target=lambda: Source().name)
thread.start()
inside.wait()
child = os.fork()
if not child:
    os._exit(not vars(Source)["name"].lock.acquire(blocking=False))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
leave.set()
thread.join()
"""


def free_in_a_child(way: str) -> bool:
    """Tell whether a child can use a cached property that another thread was computing at the fork."""
    return run_forked(IN_A_PROPERTY, [way]).check().stdout.split() == ["0"]


locked = pytest.mark.skipif(sys.version_info >= (3, 12), reason="cached properties have no lock from Python 3.12 on")


@locked
def test_a_child_can_use_the_cached_property_that_another_thread_was_computing() -> None:
    assert free_in_a_child("library")


@locked
def test_control_without_the_library_its_lock_is_taken_for_good() -> None:
    assert not free_in_a_child("torch alone")


@pytest.mark.hang_timeout(240)
def test_children_forked_at_any_moment_can_do_everything() -> None:
    assert run_isolated(PROGRAM, ["library", "12", "60"], timeout=200).check().stdout.split() == ["0"]


@pytest.mark.hang_timeout(640)
def test_control_some_children_of_torch_alone_hang_or_fail() -> None:
    # All of them may have been forked in a good moment.
    assert any(run_isolated(PROGRAM, ["alone", "5", "5"], timeout=200).stdout.split() != ["0"] for _ in range(3))
