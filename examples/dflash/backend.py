"""The compiler backend of the example's hot functions, chosen once at import."""

from __future__ import annotations

import os
import shutil

import torch


def choose() -> str:
    """Return the backend for `torch.compile`, and never one that cannot work here.

    On a GPU: Inductor, which `flex_attention` needs. On CPU: Inductor only if asked for by ``DFLASH_BACKEND=inductor`` and a
    C++ compiler is there; the demo is too short to earn back the minutes that compiling C++ takes.

    Raises:
        ValueError: if ``DFLASH_BACKEND`` names anything but ``inductor`` and ``aot_eager``.
    """
    asked = os.environ.get("DFLASH_BACKEND", "inductor" if torch.cuda.is_available() else "aot_eager")
    if asked not in ("inductor", "aot_eager"):
        raise ValueError(f"DFLASH_BACKEND is {asked!r}: use 'inductor' or 'aot_eager'")
    if asked == "inductor" and not torch.cuda.is_available() and not cpp_compiler():
        return "aot_eager"
    return asked


def cpp_compiler() -> str | None:
    """Return the path of the C++ compiler that Inductor would use on CPU, or None."""
    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


BACKEND = choose()
