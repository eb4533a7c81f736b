"""The interpreter ends while threads compile with Inductor (D3): quietly, and with their results."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.subprocess_run import IsolatedResult, run_isolated

pytestmark = [pytest.mark.inductor, pytest.mark.hang_timeout(240)]

# `ending` is set when the main thread has ended: with torch alone after the pools are shut down, with the library before
# it waits for compiles; `closed` after all that. Functions are called in the reverse order of their registration.
# A daemon does nothing after its compile: one that runs torch then can abort the process, without any compile too.
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
    assert ending.wait(60)
    compiled = torch._inductor.compile_fx.compile_fx(graph, inputs)
    return compiled if kind == "thread" else lambda *_: threading.Event().wait()

def inside_a_compile():
    report(1, torch.compile(lambda x: x.sin() + 1, backend=backend))

def after_all():
    assert closed.wait(60)
    report(2, torch.compile(lambda x: x.sin() + 2))  # another kernel: for one in the cache no pool is needed

def report(number, f):
    x = torch.ones(3)
    torch.testing.assert_close(f(x), x.sin() + number)
    print(number, "is right", flush=True)

for work in [inside_a_compile] if kind == "daemon" else [inside_a_compile, after_all]:
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
    assert sorted(workers) == (["1 is right", "2 is right"] if kind == "thread" else [])


def test_control_such_compiles_die_with_torch_alone(tmp_path: Path) -> None:
    result = run("alone", "thread", tmp_path)
    assert result.stderr.count("cannot schedule new futures after") >= 2, result
    assert result.stdout == "main ends\n"
