"""Streams that graphs are captured on: nobody else has them, and what cuBLAS keeps for others is left alone."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from safecompile._patches import capture_streams, cuda_graphs, patches
from tests.helpers.subprocess_run import run_isolated
from tests.helpers.threads import run_threads
from tests.helpers.torch_version import TORCH

if TYPE_CHECKING:
    from collections.abc import Iterator

    from safecompile._patches.capture_streams import CaptureStreams

# -------------------------------------------------------------------------------------------------- on any machine


@pytest.fixture
def cleared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch's function that frees all workspaces was called for."""
    calls: list[str] = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: calls.append("all"), raising=False)
    return calls


@pytest.fixture
def point(cleared: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[CaptureStreams]:
    from torch._inductor import cudagraph_trees

    (point,) = (one for one in patches.points if isinstance(one, capture_streams.CaptureStreams))
    point.restore()
    for name in ("run_eager", "record_function"):
        free = lambda _: cudagraph_trees.clear_cublass_cache()  # noqa: E731  what torch's begin with
        monkeypatch.setattr(cudagraph_trees.CUDAGraphTreeManager, name, free)
    monkeypatch.setattr(
        capture_streams, "_take_workspaces", lambda stream: cleared.append(f"took {stream.cuda_stream}")
    )
    point.install()  # where torch is made for a CPU, too
    yield point
    point.restore()


@pytest.mark.parametrize("step", ["run_eager", "record_function"])
@pytest.mark.parametrize("kept", [True, False], ids=["where workspaces are kept", "where one stream's can be freed"])
def test_a_recording_frees_no_workspace_but_its_streams(
    kept: bool, step: str, point: CaptureStreams, cleared: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import cudagraph_trees

    monkeypatch.setattr(point, "_kept", kept)
    monkeypatch.setattr(point, "_clear_one", None if kept else lambda stream: cleared.append(f"stream {stream.value}"))
    manager: Any = object.__new__(cudagraph_trees.CUDAGraphTreeManager)
    manager.stream, manager.device_index = SimpleNamespace(cuda_stream=7), 0
    getattr(manager, step)()
    cudagraph_trees.clear_cublass_cache()
    assert cleared == (["took 7"] if kept else ["stream 7", "all"])


def test_control_torch_frees_all(cleared: list[str]) -> None:
    from torch._inductor import cudagraph_trees

    cudagraph_trees.clear_cublass_cache()
    assert cleared == ["all"]


@pytest.mark.skipif(torch.version.cuda is None or TORCH < (2, 12), reason="this torch has no such function")
def test_torchs_function_that_frees_one_streams_workspaces_is_found() -> None:
    program = (
        "from safecompile._patches import capture_streams; capture_streams._clear_of_a_stream()(None); print('freed')"
    )
    assert run_isolated(program).check().stdout == "freed\n"


def test_what_records_asks_for_a_stream_of_its_own(point: CaptureStreams) -> None:
    def asked() -> list[bool]:
        return [capture_streams._NAME in recorder.__code__.co_names for recorder in capture_streams._recorders()]

    assert asked() == [True, True]
    assert vars(torch.cuda)[capture_streams._NAME] is capture_streams.own_stream
    point.restore()
    assert asked() == [False, False]
    assert capture_streams._NAME not in vars(torch.cuda)


class Driver:
    """Makes streams, numbered from 1."""

    def __init__(self) -> None:
        self.made, self.status = 0, 0

    def cuStreamCreate(self, made: Any, flags: int) -> int:  # noqa: N802  CUDA's name
        assert flags == 1
        self.made += 1
        made._obj.value = self.made
        return self.status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: driver)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda number, device: (device, number))
    return driver


def test_each_thread_has_one_stream_for_each_device_and_leaves_it_with_its_graphs(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "_left", deque())
    device = iter([70] * 12 + [70, 80, 70])  # which no machine has
    monkeypatch.setattr(torch.cuda, "current_device", lambda: next(device))
    own: Any = capture_streams.own_stream
    together = threading.Barrier(3)

    def of_three_threads() -> set[Any]:
        def twice() -> Any:
            own()
            together.wait(60)  # before one ends, and another takes over what it has
            return own()

        streams = {*run_threads([twice] * 3)}
        while len(cuda_graphs._left) < 3:  # after they can be joined
            time.sleep(0.001)
        return streams

    cuda_graphs.calling_thread()
    assert of_three_threads() == of_three_threads() == {(70, 1), (70, 2), (70, 3)}
    assert (own(), own(), own()) == ((70, 4), (80, 5), (70, 4))


def test_a_stream_that_cuda_does_not_make_is_an_error(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 99)
    driver.status = 2
    with pytest.raises(RuntimeError, match="CUDA makes no stream to record graphs on: cuStreamCreate returned 2"):
        capture_streams.own_stream()
    assert 99 not in cuda_graphs.calling_thread().capture_streams


# ----------------------------------------------------------------------------------------------- beside a recording

RECORDING = """
import threading
import torch
from safecompile import thread_safe_compile

recording, go_on = threading.Event(), threading.Event()

@torch.library.custom_op("safecompile_tests::halt", mutates_args=())
def halt(x: torch.Tensor) -> torch.Tensor:
    if torch.cuda.is_current_stream_capturing():
        recording.set()
        assert go_on.wait(60)
    return x.clone()

@halt.register_fake
def _(x):
    return torch.empty_like(x)

call = {make}(lambda x: halt(x @ x), mode="reduce-overhead")

def record():
    x = torch.ones(64, 64, device="cuda")
    for _ in range(5):
        call(x)
    torch.cuda.synchronize()

def beside_it(act):
    def beside():
        assert recording.wait(120)
        try:
            act()
        finally:
            go_on.set()

    thread = threading.Thread(target=beside)
    thread.start()
    record()
    thread.join()
"""

LAUNCHES = """
streams, counts = [torch.cuda.Stream() for _ in range(64)], torch.zeros(64, device="cuda")

def launch():
    for stream, count in zip(streams, counts.unbind()):
        with torch.cuda.stream(stream):
            count += 1

beside_it(launch)
print(counts.sum().item())
"""

WORKSPACES = """
def allocated():
    blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]
    return {block["address"] for block in blocks if block["state"] == "active_allocated"}

torch.cuda.init()
before = allocated()
torch.cuda.current_blas_handle()
mine = allocated() - before
left = []
beside_it(lambda: left.append(mine & allocated()))
print(len(mine), len(left[0]))
"""


@pytest.mark.gpu
@pytest.mark.hang_timeout(300)
@pytest.mark.parametrize(
    ("make", "all_once"), [("thread_safe_compile", True), ("torch.compile", False)], ids=["library", "control"]
)
def test_what_is_launched_beside_a_recording_is_run_once(make: str, all_once: bool) -> None:
    """Control: with torch alone, what is launched on the recording's stream is run whenever the graph is."""
    counted = run_isolated(RECORDING.format(make=make) + LAUNCHES).check().stdout
    assert float(counted) == 64 if all_once else float(counted) > 64, counted


@pytest.mark.gpu
@pytest.mark.hang_timeout(300)
@pytest.mark.parametrize(
    ("make", "left"), [("thread_safe_compile", 1), ("torch.compile", 0)], ids=["library", "control"]
)
def test_a_recording_leaves_cublas_the_workspace_of_another_stream(make: str, left: int) -> None:
    """Control: torch alone frees it, also when a thread is about to launch a product with it."""
    assert run_isolated(RECORDING.format(make=make) + WORKSPACES).check().stdout == f"1 {left}\n"


@pytest.mark.gpu
def test_the_stream_of_a_thread_is_none_of_torchs() -> None:
    program = """
    import torch
    from safecompile._patches import capture_streams

    torch.zeros(1, device="cuda")
    own = capture_streams.own_stream().cuda_stream
    print(own in [torch.cuda.Stream().cuda_stream for _ in range(64)], own == torch.cuda.default_stream().cuda_stream)
    """
    assert run_isolated(program).check().stdout == "False False\n"


@pytest.mark.gpu
@pytest.mark.hang_timeout(300)
@pytest.mark.parametrize("setting", ["", ":4096:8"], ids=["without products", "with products"])
def test_graphs_are_recorded_while_deterministic_algorithms_are_asked_for(setting: str) -> None:
    """A recording computes a product, so that cuBLAS has its workspaces: torch raises at each, without the setting."""
    program = f"""
    import os
    os.environ |= {{"CUBLAS_WORKSPACE_CONFIG": {setting!r}}} if {setting!r} else {{}}
    import torch
    from safecompile import thread_safe_compile

    torch.use_deterministic_algorithms(True)
    x = torch.eye(64, device="cuda")
    call = thread_safe_compile(lambda x: (x @ x).sin() if {setting!r} else x.sin(), mode="reduce-overhead")
    print(all(torch.allclose(call(x), x.sin()) for _ in range(5)))
    """
    assert run_isolated(program).check().stdout == "True\n"
