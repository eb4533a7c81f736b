"""P6: what importing the library costs."""

from __future__ import annotations

import time
from typing import Any


def imports(*, safe: bool) -> dict[str, Any]:
    """Import torch, and the library after it."""
    began = time.perf_counter()
    import torch  # noqa: F401

    imported = time.perf_counter()
    if safe:
        import safecompile  # noqa: F401
    ended = time.perf_counter()
    return {"total": ended - began, "safecompile": ended - imported}
