"""Streams to capture CUDA graphs on: nobody else has them, and a recording leaves alone what cuBLAS keeps for other threads."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes

from safecompile._patches.cuda_graphs import calling_thread, import_trees
from safecompile._patches.point import PatchPoint

_NAME = "safecompile_stream"
_STEPS = ("run_eager", "record_function")


class CaptureStreams(PatchPoint):
    """Gives what records graphs a stream of its own, and frees no cuBLAS workspace but that of this stream."""

    name = "capture-streams"
    protects = (
        "what another thread launches on the stream of a recording becomes part of the graph instead of being run, and "
        "torch.cuda.Stream() hands out 32 streams in turn; each recording frees the cuBLAS workspaces of all threads, also of "
        "one that is about to launch: illegal memory accesses, or wrong results in silence (S8)"
    )
    upstream = "pytorch#185836, pytorch#175276; torch/_inductor/cudagraph_trees.py, clear_cublass_cache"
    relies_on = tuple(f"torch._inductor.cudagraph_trees:CUDAGraphTreeManager.{name}" for name in _STEPS)

    def __init__(self) -> None:
        super().__init__()
        self._recording = threading.local()
        # Older torch can only free the workspaces of all streams. There they are kept instead: graphs of one stream use
        # those of that stream, outside of their memory pool, and so nothing has to be freed before or after a recording.
        self._kept = [int(part) for part in torch.__version__.split(".")[:2]] < [2, 12]

    def needed(self) -> bool:
        return bool(torch.version.cuda)

    def mismatch(self) -> str | None:
        import_trees()
        known = all("Stream" in recorder.__code__.co_names for recorder in _recorders())
        return super().mismatch() if known else "torch makes no stream where it records CUDA graphs"

    def apply(self) -> None:
        from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

        self.replace(torch.cuda, _NAME, own_stream)
        for recorder in _recorders():
            names = (_NAME if name == "Stream" else name for name in recorder.__code__.co_names)
            self.recode(recorder, recorder.__code__.replace(co_names=(*names,)))
        self._clear_one = None if self._kept else _clear_of_a_stream()
        for name in _STEPS:
            self.wrap(CUDAGraphTreeManager, name, self._record)
        self.wrap(torch._C, "_cuda_clearCublasWorkspaces", self._clear)

    def _record(self, record: Callable[..., Any], manager: Any, args: Any, kwargs: Any) -> Any:
        if self._kept:
            _take_workspaces(manager.stream)
        self._recording.stream = manager.stream
        try:
            return record(*args, **kwargs)
        finally:
            self._recording.stream = None

    def _clear(self, clear: Callable[[], None], *_: Any) -> None:
        stream = getattr(self._recording, "stream", None)
        if self._clear_one and stream:
            self._clear_one(ctypes.c_void_p(stream.cuda_stream))
        elif not self._kept:
            clear()


def _recorders() -> list[FunctionType]:
    """Return what makes streams to record on: with trees, and without (``triton.cudagraph_trees``)."""
    from torch._inductor import compile_fx, cudagraph_trees

    return cast("list[FunctionType]", [cudagraph_trees.CUDAGraphTreeManager.__init__, compile_fx.cudagraphify_impl])


def own_stream() -> torch.cuda.Stream:
    """Return the calling thread's stream of the current device, which is none of those that torch hands out.

    Its graphs use what cuBLAS keeps for it, and so it is left to another thread only with them.

    Raises:
        RuntimeError: CUDA makes none.
    """
    device, streams = torch.cuda.current_device(), calling_thread().capture_streams
    if device not in streams:
        driver, made = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1"), ctypes.c_void_p()
        status = driver.cuStreamCreate(ctypes.byref(made), 1)  # as torch's own, it does not wait for the default stream
        if status:
            raise RuntimeError(f"CUDA makes no stream to record graphs on: cuStreamCreate returned {status}.")
        streams[device] = cast("Any", torch.cuda.ExternalStream)(made.value, device)
    return streams[device]


def _take_workspaces(stream: torch.cuda.Stream) -> None:
    """Let cuBLAS and cuBLASLt have what the calling thread works with on a stream, if they have not."""
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream), torch.no_grad(), _disable_current_modes():
        cast("Any", torch.cuda.current_blas_handle)()
        square = torch.zeros(16, 16, dtype=torch.float16, device=stream.device)
        # Where deterministic algorithms are asked for without the setting that they need, no product can be computed.
        if torch.get_deterministic_debug_mode() < 2 or "CUBLAS_WORKSPACE_CONFIG" in os.environ:  # noqa: PLR2004
            torch.addmm(square[0], square, square)


def _clear_of_a_stream() -> Any:
    """Return torch's function that frees the workspaces of one stream, which Python has no name for, if there is one."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    name = "_ZN2at4cuda30clearCublasWorkspacesForStreamEP11CUstream_st"
    return getattr(ctypes.CDLL(str(library)), name, None) if library.exists() else None
