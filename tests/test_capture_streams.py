"""Streams that graphs are captured on: nobody else has them, and what cuBLAS keeps for others is left alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from safecompile._patches import capture_streams, patches
from tests.helpers.subprocess_run import run_isolated
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
    (point,) = (one for one in patches.points if isinstance(one, capture_streams.CaptureStreams))
    point.restore()
    monkeypatch.setattr(
        capture_streams, "_take_workspaces", lambda stream: cleared.append(f"took {stream.cuda_stream}")
    )
    point.install()  # where torch is made for a CPU, too
    yield point
    point.restore()


@pytest.mark.parametrize("kept", [True, False], ids=["where workspaces are kept", "where one stream's can be freed"])
def test_a_recording_frees_no_workspace_but_its_streams(
    kept: bool, point: CaptureStreams, cleared: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import cudagraph_trees

    monkeypatch.setattr(point, "_kept", kept)
    monkeypatch.setattr(point, "_clear_one", None if kept else lambda stream: cleared.append(f"stream {stream.value}"))
    manager = SimpleNamespace(stream=SimpleNamespace(cuda_stream=7))
    point._record(cudagraph_trees.clear_cublass_cache, manager, (), {})
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
    assert (counted == "64.0\n") is all_once, counted


@pytest.mark.gpu
@pytest.mark.hang_timeout(300)
@pytest.mark.parametrize(
    ("make", "left"), [("thread_safe_compile", 1), ("torch.compile", 0)], ids=["library", "control"]
)
def test_a_recording_leaves_cublas_the_workspace_of_another_stream(make: str, left: int) -> None:
    """Control: torch alone frees it, also when a thread is about to launch a product with it."""
    assert run_isolated(RECORDING.format(make=make) + WORKSPACES).check().stdout == f"1 {left}\n"


@pytest.mark.gpu
def test_the_stream_of_a_manager_that_is_gone_is_used_again() -> None:
    program = """
    import torch
    from safecompile._patches import capture_streams

    torch.zeros(1, device="cuda")
    first = capture_streams.own_stream()
    handle = first.cuda_stream
    assert capture_streams.own_stream().cuda_stream != handle
    assert handle not in [torch.cuda.Stream().cuda_stream for _ in range(64)]
    del first
    print({capture_streams.own_stream().cuda_stream for _ in range(3)} >= {handle})
    """
    assert run_isolated(program).check().stdout == "True\n"
