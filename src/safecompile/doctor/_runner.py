"""Runs programs in processes of their own, with a limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

from safecompile.doctor._report import Run

__all__ = ["run_child", "run_program"]

_CHILD = Path(__file__).with_name("_child.py")
_DUMP_SECONDS = 5.0
_KEPT = 20_000


def run_program(module: str, how: Literal["with", "without"], *, limit: float) -> Run:
    """Run the program in ``module``, a dotted name, with safecompile or without it.

    Args:
        module: it has a ``run`` that ``safecompile.doctor._program.program`` made.
        how: "with" or "without".
        limit: seconds after which it counts as a hang; then it shows its stacks and is killed.
    """
    begin = time.monotonic()
    code, output, found = run_child(module, how, limit=limit)
    seconds = round(time.monotonic() - begin, 1)
    if code is None:
        return Run("hang", f"did not end within {limit:g} s", seconds, output)
    if code < 0:
        return Run("crash", f"ended by {signal.Signals(-code).name}", seconds, output)
    if found is None:
        return Run("error", f"ended with exit code {code} and without a result", seconds, output)
    return Run(found["outcome"], found["detail"], seconds, found.get("output", ""))


def run_child(what: str, how: str, *, limit: float) -> tuple[int | None, str, Any]:
    """Run the child; return its exit code (``None`` for a hang), its last output, and what it has found."""
    with tempfile.TemporaryDirectory() as directory:
        result, output = Path(directory, "result.json"), Path(directory, "output.txt")
        # Files and not pipes: what the program leaves behind could hold a pipe open.
        with (
            output.open("wb") as file,
            subprocess.Popen(  # noqa: S603  this Python, and a file of ours
                [sys.executable, "-X", "faulthandler", str(_CHILD), what, how, str(result)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ) as process,
        ):
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
                process.send_signal(signal.SIGABRT)  # faulthandler answers with the stacks of all threads
                try:
                    process.wait(_DUMP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
            finally:
                _kill_group(process)
        text = output.read_text(errors="replace")[-_KEPT:]
        found = json.loads(result.read_text()) if code == 0 and result.exists() else None
    return code, text, found


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the child and what it has started, which may hang as well."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
