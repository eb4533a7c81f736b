"""What torch's CUDA build on a machine without a GPU needs (C3), for tests of other faults."""

from __future__ import annotations

import torch


def ask_for_the_device_guard() -> None:
    """Let this thread be the first to ask: a later compile crashes if the first one's thread has ended.

    The patches see to it. A test that compiles without them, or a control with torch alone, would show this fault only.
    """
    if torch.version.cuda is not None and not torch.cuda.is_available():
        getattr(torch._C, "_ensureCUDADeviceGuardSet", bool)()
