"""torch's CUDA build on a machine without a GPU."""

from __future__ import annotations

import threading

import torch

from safecompile._patches.point import PatchPoint


class DeviceGuard(PatchPoint):
    """Lets a thread that does not end be the first to ask for the device guard, which is that thread's then."""

    name = "device-guard"
    protects = "a compile crashes after the thread that made the first one has ended (C3)"
    upstream = "torch/_subclasses/fake_tensor.py, init_gpu_context"

    def needed(self) -> bool:
        without_gpu = torch.version.cuda is not None and not torch.cuda.is_available()
        return without_gpu and hasattr(torch._C, "_ensureCUDADeviceGuardSet")

    def apply(self) -> None:
        if threading.current_thread() is threading.main_thread():
            torch._C._ensureCUDADeviceGuardSet()
        elif not any(thread.name == self.name for thread in threading.enumerate()):
            asked = threading.Event()
            threading.Thread(target=_ask_and_stay, args=[asked], name=self.name, daemon=True).start()
            asked.wait()


def _ask_and_stay(asked: threading.Event) -> None:
    torch._C._ensureCUDADeviceGuardSet()
    asked.set()
    threading.Event().wait()
