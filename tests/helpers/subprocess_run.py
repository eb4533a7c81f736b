"""Programs in processes of their own, for hazards that can crash, hang or poison the process they run in."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).resolve().parents[2]
_DUMP_SECONDS = 10.0

# A process that does nothing but import these, which takes seconds, and fork.
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["torch._dynamo.convert_frame", "torch._functorch.aot_autograd", "pytest"])


@dataclass(frozen=True)
class IsolatedResult:
    """How a program ended. A negative `rc` is the signal that ended it; after a hang `stderr` has all stacks."""

    rc: int
    stdout: str
    stderr: str
    hung: bool

    def check(self) -> IsolatedResult:
        """Return self, or raise an AssertionError with all output if the program hung or its exit code is not 0."""
        how = "hung" if self.hung else f"ended with {self.rc}"
        assert self.rc == 0 and not self.hung, f"the program {how}\nstdout:\n{self.stdout}\nstderr:\n{self.stderr}"
        return self


def run_isolated(
    program: str | Path,
    args: Sequence[str] = (),
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> IsolatedResult:
    """Run a program in a Python process of its own, which can import `tests.helpers`.

    Args:
        program: a path, or source text (indented as it stands in the test).
        args: the program's arguments.
        timeout: seconds until it counts as hung; then its stacks are dumped and it is killed.
        env: variables set in addition to this process's.
    """
    with tempfile.TemporaryDirectory() as directory:
        if isinstance(program, str):
            # A file, not `-c`: tracebacks then have source lines, and spawned processes can import the program.
            path = Path(directory, "program.py")
            path.write_text(textwrap.dedent(program))
        else:
            path = program
        python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with subprocess.Popen(
            [sys.executable, "-X", "faulthandler", str(path), *args],
            env={**os.environ, "PYTHONPATH": python_path, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                stdout, stderr = process.communicate(timeout=timeout)
                hung = False
            except subprocess.TimeoutExpired:
                hung = True
                process.send_signal(signal.SIGABRT)  # `-X faulthandler` answers with the stacks of all threads
                try:
                    stdout, stderr = process.communicate(timeout=_DUMP_SECONDS)
                except subprocess.TimeoutExpired:  # children of the program hold the pipes
                    os.killpg(process.pid, signal.SIGKILL)
                    stdout, stderr = process.communicate()
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
    return IsolatedResult(process.returncode, stdout, stderr, hung)


def run_forked(program: str, args: Sequence[str] = (), timeout: float = 60.0) -> IsolatedResult:
    """Run a program as `run_isolated` does, in a process that is forked with torch and Dynamo imported: seconds sooner.

    For all programs but those that test what is imported when, or how the interpreter ends: it does not shut down.
    """
    with tempfile.TemporaryDirectory() as directory:
        path, stdout, stderr = (Path(directory, name) for name in ("program.py", "stdout", "stderr"))
        path.write_text(textwrap.dedent(program))
        process = _forks.Process(target=_run_in_fork, args=(path, args, stdout, stderr))
        process.start()
        try:
            process.join(timeout)
            hung = process.is_alive()
            if hung and process.pid is not None:
                os.kill(process.pid, signal.SIGABRT)
                process.join(_DUMP_SECONDS)
        finally:
            process.kill()
            process.join()
        assert process.exitcode is not None
        return IsolatedResult(process.exitcode, stdout.read_text(), stderr.read_text(), hung)


def _run_in_fork(path: Path, args: Sequence[str], stdout: Path, stderr: Path) -> None:
    for descriptor, file in ((1, stdout), (2, stderr)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by all that a shell runs in the background
    multiprocessing.set_start_method(None, force=True)  # the default again: the fork has its server's
    sys.argv = [str(path), *args]
    from tests.helpers.device_guard import ask_for_the_device_guard

    ask_for_the_device_guard()
    runpy.run_path(str(path), run_name="__main__")
