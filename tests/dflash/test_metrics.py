"""Metrics go to the run's file and to what the options name: whole, once, and not in silence where they cannot."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="its version is in the checkpoints")
pytest.importorskip("rich", reason="the example's display")
pytest.importorskip("matplotlib", reason="the example's plots")

import demo
import metrics
import train
from checkpoints import Snapshot, by_step
from command import command_line
from config import Config, ConfigError
from metrics import MetricsError, TensorBoard, scalars
from prepare import prepare
from run_folder import RunFolder
from tests.dflash.test_demo import arguments

FULL = "No space left on device"


class Recorder:
    """A sink of somebody's own; fails where it is told to."""

    made: list[Recorder] = []  # noqa: RUF012  # one list for all
    fails_at = ""

    def __init__(self, run: Path, first_step: int, options: Mapping[str, Any]) -> None:
        self.run, self.first_step, self.options = run, first_step, options
        self.lines: list[dict[str, Any]] = []
        self.closed = 0
        if self.fails_at == "open":
            raise OSError(FULL)
        self.made.append(self)

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        if kind == self.fails_at:
            raise OSError(FULL)
        self.lines.append({"kind": kind, **values})

    def close(self) -> None:
        self.closed += 1
        if self.fails_at == "close":
            raise OSError(FULL)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of `Recorder` as an option."""
    monkeypatch.setattr(Recorder, "made", [])
    monkeypatch.setattr(Recorder, "fails_at", "")
    monkeypatch.setitem(sys.modules, "somebodys_own", sys.modules[__name__])
    return "somebodys_own:Recorder"


def opened(folder: Path, *names: str, first_step: int = 0) -> RunFolder:
    made = RunFolder(folder, Config(), "resume" if first_step else "fresh", metrics.factories(names))
    made.open_sinks(first_step)
    return made


def lines(folder: Path) -> list[dict[str, Any]]:
    return list(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()))


def test_a_sink_gets_every_line_of_the_file_in_its_order(tmp_path: Path, own: str) -> None:
    folder = opened(tmp_path, own)
    folder.metric("stage", stage="load", seconds=1.0)  # before training begins
    folder.begin()
    folder.metric("step", step=0, loss=2.0)
    folder.close()
    folder.metric("step", step=1, loss=1.0)  # of a thread left behind
    (recorder,) = Recorder.made
    assert recorder.lines == lines(tmp_path)[:2]
    assert len(lines(tmp_path)) == 3
    assert (recorder.run, recorder.first_step, recorder.closed) == (tmp_path, 0, 1)
    assert recorder.options == Config().as_json()
    opened(tmp_path, own, first_step=7).resume(7, 1.0)
    assert Recorder.made[1].first_step == 7
    assert Recorder.made[1].lines == []


def test_a_sink_that_hangs_does_not_keep_a_run_from_its_end(
    tmp_path: Path, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, go_on = threading.Event(), threading.Event()

    def hang(self: Recorder, kind: str, values: Mapping[str, Any]) -> None:
        writes.set()
        assert go_on.wait(60)

    monkeypatch.setattr(Recorder, "write", hang)
    folder = opened(tmp_path, own)
    folder.begin()
    with ThreadPoolExecutor(2) as pool:
        left_behind = pool.submit(folder.metric, "step", step=0)
        assert writes.wait(60)
        end = pool.submit(folder.close, grace=0.0)
        try:
            with pytest.raises(MetricsError, match=f"could not be handed to {own}: TimeoutError: a write has not come"):
                end.result(timeout=30)
        finally:
            go_on.set()
        left_behind.result(timeout=60)
    folder.close()
    assert Recorder.made[0].closed == 1


@pytest.mark.parametrize("kind", ["step", "close"])
def test_a_sink_that_fails_is_named_and_the_file_and_the_others_have_what_came(
    tmp_path: Path, own: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    class Other(Recorder):
        pass

    monkeypatch.setattr(sys.modules[__name__], "Other", Other, raising=False)
    folder = opened(tmp_path, own, "somebodys_own:Other")
    folder.begin()
    monkeypatch.setattr(Recorder, "fails_at", kind)
    monkeypatch.setattr(Other, "fails_at", "")

    def use() -> None:
        folder.metric("step", step=0)
        folder.close()

    with pytest.raises(MetricsError, match=f"could not be handed to {own}: OSError: {FULL}"):
        use()
    assert lines(tmp_path) == [{"kind": "step", "step": 0}]
    if kind == "close":
        assert [made.closed for made in Recorder.made] == [1, 1]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tensorbord", "metrics names 'tensorbord': use tensorboard, or package.module:factory"),
        ("nowhere.at_all:Sink", "cannot be imported (ModuleNotFoundError: No module named 'nowhere'): is its folder"),
        ("json:Sink", "cannot be imported (AttributeError"),
        ("json:__doc__", "cannot be called"),
        ("tensorboard,tensorboard", "metrics names tensorboard twice"),
    ],
)
def test_what_cannot_take_metrics_is_refused_before_any_work(
    tiny_target: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    says: str,
) -> None:
    monkeypatch.setattr(demo, "Run", None)
    assert demo.main([*arguments(tiny_target, text, tmp_path / "run"), "--metrics", name]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: metrics names")
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_tensorboard_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        metrics.factories(["tensorboard"])


def test_numbers_get_names_by_their_places() -> None:
    line = {"threads": {"target-0": {"idle": 0.5}}, "shares": [0.75, None], "device": "cuda:0", "bytes": 3}
    assert dict(scalars("memory", line)) == {
        "memory/cuda:0/threads/target-0/idle": 0.5,
        "memory/cuda:0/shares/1": 0.75,
        "memory/cuda:0/bytes": 3.0,
    }


def shown(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard shows of the scalars in a run folder: step and value."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "tensorboard"), {"scalars": 0})
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in sorted(events.Tags()["scalars"])
    }


def ignoring(run: Path, first_step: int, options: Mapping[str, Any]) -> metrics.Sink:
    """Open TensorBoard as if no step came before."""
    from torch.utils.tensorboard import SummaryWriter

    made = TensorBoard.__new__(TensorBoard)
    made._writer = SummaryWriter(run / "tensorboard")
    return made


@pytest.mark.parametrize("factory", [TensorBoard, ignoring], ids=["from the first step on", "beside the old"])
def test_tensorboard_shows_each_step_once_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factory: Callable[..., metrics.Sink]
) -> None:
    """With files only laid beside those of the run before, steps would be there twice."""
    pytest.importorskip("tensorboard")
    folder = opened(tmp_path, "tensorboard")
    folder.begin()
    folder.metric("stage", stage="load", seconds=3.0)  # of no step
    for step in range(6):
        folder.metric("step", step=step, loss=10.0 - step, queues={"drafter-0": 2})
    folder.metric("evaluation", step=4, tau=2.0)
    folder.close()
    assert shown(tmp_path)["step/loss"] == [(step, 10.0 - step) for step in range(6)]

    monkeypatch.setattr(metrics, "TensorBoard", factory)
    folder = opened(tmp_path, "tensorboard", first_step=4)
    folder.resume(4, 1.0)
    for step in range(4, 8):
        folder.metric("step", step=step, loss=20.0 - step, queues={"drafter-0": 1})
    folder.metric("evaluation", step=4, tau=3.0)
    folder.close()
    once = {
        "evaluation/tau": [(4, 3.0)],
        "step/loss": [(step, (10.0 if step < 4 else 20.0) - step) for step in range(8)],
        "step/queues/drafter-0": [(step, 2.0 if step < 4 else 1.0) for step in range(8)],
    }
    assert (shown(tmp_path) == once) is (factory is not ignoring)


def test_tensorboard_forgets_the_run_before_a_restart(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for loss in (5.0, 4.0):
        folder = opened(tmp_path, "tensorboard")
        folder.begin()
        folder.metric("step", step=0, loss=loss)
        folder.close()
    assert shown(tmp_path) == {"step/loss": [(0, 4.0)]}


def one_step(self: train.Training, report: Callable[..., None], tick: Callable[[], None]) -> None:
    """Train, so to speak."""
    self.crew.start("drafter-0", lambda: report(0, {"loss": 1.0, "eal": 1.0}))
    self.crew.join()
    raise InterruptedError("went on")


@pytest.mark.parametrize("fails_at", ["open", "step", "close"])
def test_a_sink_that_fails_ends_the_run_with_its_error(
    tiny_target: Path,
    text: Path,
    tmp_path: Path,
    own: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fails_at: str,
) -> None:
    run = tmp_path / "run"
    given = [*arguments(tiny_target, text, run), "--metrics", own]
    prepare(command_line(given).config, run).checkpoints.save(Snapshot(3, {}, {}), 0.0)
    monkeypatch.setattr(Recorder, "fails_at", fails_at)
    if fails_at == "close":
        monkeypatch.setattr(demo.Run, "complete", lambda self: self.folder.open_sinks(0) or [])
    monkeypatch.setattr(train.Training, "run", one_step)
    assert demo.main([*given, "--restart"]) == 1
    printed = capsys.readouterr()
    assert f"metrics could not be handed to {own}: OSError: {FULL}; repair that, or go on without it" in printed.err
    assert "all checks passed" not in printed.out
    summary = json.loads((run / "summary.json").read_text())
    if fails_at == "close":
        return
    assert summary["status"] == "failed"
    assert f"handed to {own}" in summary["error"]
    # One that cannot be opened fails before anything of the run before is deleted.
    assert [step for step, _ in by_step(run / "checkpoints")] == ([3] if fails_at == "open" else [])
    assert [made.closed for made in Recorder.made] == ([] if fails_at == "open" else [1])
