"""The interpreter ends while threads compile with Inductor (D3): quietly, and with their results."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.subprocess_run import IsolatedResult, run_isolated

pytestmark = [pytest.mark.inductor, pytest.mark.hang_timeout(240)]

# `ending` is set when the main thread has ended: with torch alone after the pools are shut down, with the library before
# it waits for compiles; `closed` after all that. Functions are called in the reverse order of their registration.
PROGRAM = """
import sys, threading
closed, ending, inside = threading.Event(), threading.Event(), threading.Event()
threading._register_atexit(closed.set)
import torch
import torch._inductor.compile_fx

how, kind = sys.argv[1:]
if how == "library":
    import safecompile
    safecompile.install()
    threading._register_atexit(ending.set)
else:
    ending = closed

def backend(graph, inputs):
    inside.set()
    assert ending.wait(120)
    return torch._inductor.compile_fx.compile_fx(graph, inputs)

def inside_a_compile():
    report(1, torch.compile(lambda x: x.sin() + 1, backend=backend))

def beside_it():
    assert inside.wait(120)
    report(3, torch.compile(lambda x: x.sin() + 3))

def after_all():
    assert closed.wait(120)
    report(2, torch.compile(lambda x: x.sin() + 2))  # another kernel: for one in the cache no pool is needed

def report(number, f):
    x = torch.ones(3)
    torch.testing.assert_close(f(x), x.sin() + number)
    print(number, "is right", flush=True)

for work in [inside_a_compile, beside_it] if kind == "daemon" else [inside_a_compile, beside_it, after_all]:
    threading.Thread(target=work, daemon=kind == "daemon").start()
assert inside.wait(60)
print("main ends", flush=True)
"""


def run(how: str, kind: str, caches: Path) -> IsolatedResult:
    return run_isolated(PROGRAM, [how, kind], timeout=200, env={"TORCHINDUCTOR_CACHE_DIR": str(caches)})


@pytest.mark.parametrize("kind", ["thread", "daemon"])
def test_compiles_beside_and_after_the_end_of_the_main_thread_end_in_peace(kind: str, tmp_path: Path) -> None:
    result = run("library", kind, tmp_path).check()
    assert "Traceback" not in result.stderr, result.stderr
    main, *workers = result.stdout.splitlines()
    assert main == "main ends"
    assert sorted(workers) == (["1 is right", "2 is right", "3 is right"] if kind == "thread" else [])


def test_control_such_compiles_die_with_torch_alone(tmp_path: Path) -> None:
    result = run("alone", "thread", tmp_path)
    assert result.stderr.count("cannot schedule new futures after") >= 2, result
    assert result.stdout == "main ends\n"


# A compile in a daemon that never ends: it waits for ever, or computes. torch takes the interpreter lock after an
# operator in a destructor, where the end of the thread ends the process.
NEVER_ENDING = """
import sys, threading
import torch

how, what = sys.argv[1:]
if how == "library":
    from safecompile._patches import interpreter_exit
    interpreter_exit.DAEMONS_LIMIT = 0.5 if what == "waits" else 60.0
    import safecompile
    safecompile.install()
inside = threading.Event()

def backend(graph, inputs):
    inside.set()
    if what == "waits":
        threading.Event().wait()
    while True:
        torch.ones(100000).sin()

threading.Thread(target=torch.compile(torch.sin, backend=backend), args=[torch.ones(3)], daemon=True).start()
assert inside.wait(60)
print("main ends", flush=True)
"""


@pytest.mark.parametrize("what", ["waits", "computes"])
def test_a_daemon_whose_compile_never_ends_does_not_hold_up_the_end(what: str) -> None:
    result = run_isolated(NEVER_ENDING, ["library", what]).check()
    assert (result.stdout, result.stderr) == ("main ends\n", "")


def test_control_with_torch_alone_such_a_daemon_aborts_the_process() -> None:
    assert any(run_isolated(NEVER_ENDING, ["alone", "computes"]).rc != 0 for _ in range(10))
