"""Runs in a process of its own, as a script: one program, or the look at all patch points."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import traceback
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]


def main() -> None:
    """Do what the arguments say, and write what was found to the file that they name."""
    what, how, result = sys.argv[1:]
    # Not the doctor's folder, but the one with the package; last in line, unless it is there already.
    sys.path.pop(0)
    if str(PACKAGE.parent) not in sys.path:
        sys.path.insert(0, str(PACKAGE.parent))
    if how == "without":  # torch alone: of the package only the doctor is imported
        alone = ModuleType("safecompile")
        alone.__path__ = [str(PACKAGE)]
        sys.modules["safecompile"] = alone
    found = look_at_patches() if what == "patches" else run(what, library=how == "with")
    Path(result).write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # threads of a program may hang


def run(module: str, *, library: bool) -> dict[str, str]:
    """Run a program and tell how it ended."""
    described = importlib.import_module(module).run
    from safecompile.doctor._program import Case, FaultError, HangError, NotApplicableError, first_line

    try:
        check_needs(described.needs)
        if library:
            import safecompile

            safecompile.install()
        return {"outcome": "healthy", "detail": described.run(Case(library=library)) or ""}
    except FaultError as error:
        return {"outcome": "fault", "detail": str(error)}
    except HangError as error:
        return {"outcome": "hang", "detail": str(error)}
    except NotApplicableError as error:
        return {"outcome": "not applicable", "detail": str(error)}
    except BaseException as error:
        return {"outcome": "error", "detail": first_line(error), "output": traceback.format_exc()}


def check_needs(needs: str | None) -> None:
    """Tell whether this machine can run a program."""
    import shutil
    import sysconfig

    import torch

    from safecompile.doctor._program import NotApplicableError

    if needs == "gpu" and not torch.cuda.is_available():
        raise NotApplicableError("needs a GPU")
    if needs == "inductor":
        compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
        if shutil.which(compiler) is None:
            raise NotApplicableError(f"needs a C++ compiler: {compiler} was not found")
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            raise NotApplicableError("needs Python's headers: Python.h was not found")


def look_at_patches() -> list[dict[str, Any]]:
    """Install the patch points, and tell of each whether it matches this torch."""
    from safecompile import _patches

    warnings.simplefilter("ignore")
    _patches.patches.install()
    found = []
    for point in _patches.patches.points:
        # Asked again only where it is not installed: an installed one sees itself in torch's place.
        reason = None if point.active else _patches._install(point)
        state = "mismatch" if reason else "matches" if point.active else "not needed"
        row = {"name": point.name, "protects": point.protects, "upstream": point.upstream}
        found.append({**row, "state": state, "detail": reason or ""})
    return found


if __name__ == "__main__":
    threading.current_thread().name = "program"
    main()
