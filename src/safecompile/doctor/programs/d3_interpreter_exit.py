"""A worker's compile dies when the main thread ends: "cannot schedule new futures after interpreter shutdown".

Python shuts its pools down before it waits for threads that are no daemons; Inductor compiles in such a pool.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from safecompile.doctor._program import Case, HangError, fault, program

__all__ = ["run"]

# A program of its own, for it is about how a program ends.
_SOURCE = """
import faulthandler, random, sys, threading
faulthandler.dump_traceback_later(100, exit=True)
how, inside, ending = sys.argv[1], threading.Event(), threading.Event()
if how == "without":
    threading._register_atexit(ending.set)  # called last, when the pools are shut down
import torch
if how == "with":
    import safecompile
    safecompile.install()
    threading._register_atexit(ending.set)  # called first: that the compile ends is waited for

@torch.compiler.assume_constant_result
def one():
    inside.set()
    assert ending.wait(30)
    return 1

def work():
    x, new = torch.ones(3), random.random()  # for a kernel that is in Inductor's cache no pool is needed
    assert torch.allclose(torch.compile(lambda x: (x * one()).sin() + new)(x), x.sin() + new)
    print("right", flush=True)

threading.Thread(target=work).start()
assert inside.wait(30)
"""


@program("D3", "a compile dies when the main thread ends", kind="hang", upstream="diffusers#3764", needs="inductor")
def run(case: Case) -> None:
    with tempfile.TemporaryDirectory() as directory:
        program_, output = Path(directory, "program.py"), Path(directory, "output.txt")
        program_.write_text(_SOURCE)
        command = [sys.executable, str(program_), "with" if case.library else "without"]
        with output.open("wb") as file:  # no pipe: Inductor's own processes hold it open for a while
            code = subprocess.run(command, stdout=file, stderr=file, check=False).returncode  # noqa: S603
        lines = output.read_text(errors="replace").splitlines()
    if any(line.startswith("Timeout (") for line in lines):
        raise HangError("the program did not end within 100 s")
    if "right" not in lines:
        errors = [line for line in lines if "Error" in line]
        fault(errors[-1][:200] if errors else f"the program ended with exit code {code}")
