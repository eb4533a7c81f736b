"""What is shown and recorded of the threads: live on a terminal, in lines elsewhere, in spans for the plot."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the example's target is a transformers model")
pytest.importorskip("rich", reason="the example's display")
pytest.importorskip("matplotlib", reason="the example's plots")

from rich.console import Console

import plots
from config import Config
from display import Display
from monitor import COMPILES, WAITS_TO_COMPILE, Monitor, memory
from run_folder import RunFolder
from safecompile import fx_trace_lock
from target import Target
from train import Training

CPU = torch.device("cpu")


@pytest.fixture
def training(tiny_target: Path) -> Training:
    config = Config(device="cpu", targets=1, drafters=2)
    training = Training(config, torch.zeros(300, dtype=torch.int32), [Target(tiny_target, (0, 2, 3), CPU)])
    for name in ("target-0", "drafter-0", "drafter-1"):
        training.monitor.add(name)
    return training


def shown(training: Training, *, terminal: bool) -> str:
    out = io.StringIO()
    display = Display(training, Console(file=out, force_terminal=terminal, width=120))
    for step in range(45):
        training.replicas[0].step = step + 1
        training.replicas[0].losses.append(3.0 - step / 100)
        display.tick(training.monitor.sample())
    display.stop()
    return out.getvalue()


def test_a_terminal_gets_a_table_of_all_threads(training: Training) -> None:
    text = shown(training, terminal=True)
    for expected in ("target-0", "drafter-0", "drafter-1", "tok/s", "queue", "compiles, s", "waits, s"):
        assert expected in text


def test_without_a_terminal_each_20th_step_is_a_plain_line(training: Training) -> None:
    lines = shown(training, terminal=False).splitlines()
    assert [line.split("loss")[0].split() for line in lines] == [["step", n, "of", "180"] for n in ("1", "21", "41")]
    assert not any("\x1b" in line for line in lines)


def test_who_compiles_and_who_waits_for_it_is_told_by_the_lock() -> None:
    monitor, holds, done = Monitor(), threading.Event(), threading.Event()

    def hold() -> None:
        with fx_trace_lock:
            holds.set()
            assert done.wait(60)

    def wait() -> None:
        assert holds.wait(60)
        with fx_trace_lock:
            pass

    threads = [threading.Thread(target=work, name=work.__name__) for work in (hold, wait)]
    for thread in threads:
        monitor.add(thread.name)
        thread.start()
    assert holds.wait(60)
    while (states := monitor.sample())["wait"] != WAITS_TO_COMPILE:
        pass
    done.set()
    for thread in threads:
        thread.join()
    assert states["hold"] == COMPILES
    assert monitor.threads["hold"].seconds[COMPILES] > 0
    assert monitor.threads["wait"].waited > 0
    assert monitor.sample() == {"hold": "starts", "wait": "starts"}


def test_a_thread_has_no_time_from_before_it_was_there() -> None:
    """A run may have loaded for minutes before its first thread: its idle share would be far above 1."""
    monitor = Monitor()
    monitor._sampled -= 1000.0
    monitor.add("late")
    monitor.threads["late"].state = "waits for work"
    monitor.sample()
    assert monitor.threads["late"].waited < 500.0
    monitor.threads["late"].since -= 100.0
    monitor.threads["late"].seconds = {"waits for work": 20.0, WAITS_TO_COMPILE: 5.0, COMPILES: 30.0, "trains": 45.0}
    monitor.threads["late"].ended = monitor.threads["late"].since + 100.0
    assert monitor.threads["late"].idle_share == pytest.approx(0.25)


def test_memory_is_told_in_bytes() -> None:
    ((device, sizes),) = memory([torch.device("cpu"), torch.device("cpu")]).items()
    assert device == "cpu"
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    assert sizes["peak_resident"] == pytest.approx(peak, rel=0.05)


@pytest.mark.gpu
def test_memory_of_a_gpu_is_told_in_bytes() -> None:
    device = torch.device("cuda:0")
    before = memory([device])["cuda:0"]
    kept = torch.zeros(2**20, device=device)
    gone = torch.zeros(2**20, device=device)
    del gone
    after = memory([device])["cuda:0"]
    assert after["allocated"] - before["allocated"] == kept.nbytes
    assert after["peak_allocated"] >= before["allocated"] + 2 * kept.nbytes
    assert after["reserved"] >= after["allocated"]


def test_changes_of_state_become_spans_up_to_the_end() -> None:
    changes: list[dict[str, str | float]] = [
        {"seconds": 0.0, "thread": "a", "state": "trains"},
        {"seconds": 1.0, "thread": "a", "state": "compiles"},
        {"seconds": 1.5, "thread": "b", "state": "answers"},
        {"seconds": 3.0, "thread": "a", "state": "trains"},
    ]
    assert plots.spans(changes, 4.0) == {
        "a": {"trains": [(0.0, 1.0), (3.0, 1.0)], "compiles": [(1.0, 2.0)]},
        "b": {"answers": [(1.5, 2.5)]},
    }


def test_pictures_are_made_from_the_folder_alone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, Config())
    folder.begin()
    folder.metric("step", step=0, loss=1.0, eal=1.5)
    folder.metric("thread", seconds=0.0, thread="target-0", state="answers")
    plots.loss(folder)
    plots.threads(folder, 2.0)
    plots.acceptance(folder, {"trained": [0.5, 0.2]})
    for name in ("loss", "threads", "acceptance"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_acceptance_length_is_drawn_if_it_was_measured_on_the_way(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, Config())
    folder.begin()
    folder.metric("evaluation", step=20, tau=3.0, tau_not_looping=None)
    plots.acceptance_length(folder)
    assert not (tmp_path / "acceptance_length.png").exists()
    folder.metric("evaluation", step=10, tau=2.0, tau_not_looping=None)  # of a copy that waited
    plots.acceptance_length(folder)
    assert (tmp_path / "acceptance_length.png").read_bytes().startswith(b"\x89PNG")
