"""What Inductor needs on the CPU beside torch: a C++ compiler and Python's headers."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path


def missing_for_inductor() -> str | None:
    """Return what Inductor misses on this machine, as a sentence, or None."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return f"Inductor on the CPU needs a C++ compiler, and {compiler} was not found"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Inductor on the CPU needs Python's headers, and Python.h was not found"
    return None
