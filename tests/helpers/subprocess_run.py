"""Programs in processes of their own, for hazards that can crash, hang or poison the process they run in."""

from __future__ import annotations

import os
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
