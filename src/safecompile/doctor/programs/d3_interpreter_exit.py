"""A worker's compile dies when the main thread ends: "cannot schedule new futures after interpreter shutdown".

Python shuts its pools down before it waits for threads that are no daemons; Inductor compiles in such a pool.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from safecompile.doctor._program import Case, fault, program

# A program of its own, for it is about how a program ends.
SOURCE = """
import os, sys, threading
how, os.environ["TORCHINDUCTOR_CACHE_DIR"] = sys.argv[1:]  # for what is in the cache no pool is needed
inside, ending = threading.Event(), threading.Event()
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
    x = torch.ones(3)
    assert torch.allclose(torch.compile(lambda x: (x * one()).sin())(x), x.sin())
    print("right", flush=True)

threading.Thread(target=work).start()
assert inside.wait(30)
"""


@program("D3", "a compile dies when the main thread ends", kind="hang", upstream="diffusers#3764", needs="inductor")
def run(case: Case) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "program.py")
        path.write_text(SOURCE)
        command = [sys.executable, str(path), "with" if case.library else "without", directory]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)  # noqa: S603  this Python, and the program above
    if ended.stdout.split() != ["right"]:
        lines = [line for line in ended.stderr.splitlines() if "Error" in line]
        fault(lines[-1][:200] if lines else f"the program ended with exit code {ended.returncode}")
