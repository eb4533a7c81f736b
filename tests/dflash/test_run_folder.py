"""A run folder belongs to one configuration, and its files are whole."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="its version is in the checkpoints")

from checkpoints import Checkpoints, Snapshot
from config import Config, ConfigError
from run_folder import RunFolder, write_json, write_tensors


def test_the_same_configuration_may_run_again(tmp_path: Path) -> None:
    for _ in range(2):
        RunFolder(tmp_path / "a" / "b", Config())
    assert [p.name for p in (tmp_path / "a" / "b").iterdir()] == ["options.json"]


def test_another_configuration_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    RunFolder(tmp_path, Config())
    before = (tmp_path / "options.json").read_bytes()
    with pytest.raises(ConfigError, match=r"another configuration \(lr, steps differ\)"):
        RunFolder(tmp_path, replace(Config(), steps=1, lr=1.0))
    assert (tmp_path / "options.json").read_bytes() == before


def test_a_resume_may_change_what_does_not_change_the_weights(tmp_path: Path) -> None:
    RunFolder(tmp_path, Config())
    RunFolder(tmp_path, replace(Config(), targets=1, save_every=7), "resume")
    assert json.loads((tmp_path / "options.json").read_text())["save_every"] == 7
    with pytest.raises(ConfigError, match=r"another configuration \(lr differ\)"):
        RunFolder(tmp_path, replace(Config(), targets=2, lr=1.0), "resume")
    with pytest.raises(ConfigError, match=r"another configuration \(save_every, targets differ\)"):
        RunFolder(tmp_path, Config(), "restart")


def test_a_run_that_was_saved_is_not_begun_again_unless_asked_for(tmp_path: Path) -> None:
    RunFolder(tmp_path, Config())
    checkpoints = Checkpoints(tmp_path / "checkpoints", Config(), torch.zeros(1))
    checkpoints.save(Snapshot(45, {}, {}), 0.0)
    with pytest.raises(
        ConfigError, match=r"was saved at step 45: go on from there with --resume, or begin .* --restart"
    ):
        RunFolder(tmp_path, Config())
    RunFolder(tmp_path, Config(), "resume")
    RunFolder(tmp_path, Config(), "restart")
    assert checkpoints.resumable() is not None  # not before the run begins
    checkpoints.begin(None)
    assert checkpoints.resumable() is None
    RunFolder(tmp_path, Config())


def test_there_must_be_a_run_to_resume(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run to resume"):
        RunFolder(tmp_path / "misspelt", Config(), "resume")
    assert list(tmp_path.iterdir()) == []


def test_a_resume_keeps_the_metrics_of_what_was_saved(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, Config())
    folder.begin()
    folder.metric("stage", stage="load", seconds=99.0)
    for step in range(6):
        folder.metric("step", step=step, loss=1 / (step + 3))
        folder.metric("thread", seconds=step / 2, thread="drafter-0", state="trains")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 6, "lo')  # killed here
    folder.resume(4, 1.7)
    assert folder.metrics("step") == [{"step": step, "loss": 1 / (step + 3)} for step in range(4)]
    threads = [(line["seconds"], line["state"]) for line in folder.metrics("thread")]
    assert threads == [(0.0, "trains"), (0.5, "trains"), (1.0, "trains"), (1.5, "trains"), (1.7, "done")]
    assert folder.metrics("stage") == [{"stage": "load", "seconds": 99.0}]
    assert folder.metrics("resume") == [{"step": 4}]
    (tmp_path / "metrics.jsonl").unlink()
    folder.resume(4, 1.7)
    assert folder.metrics("resume") == [{"step": 4}]


def test_a_resume_drops_what_was_measured_at_its_step_or_later_and_makes_it_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, Config())
    folder.begin()
    for step in (2, 4, 6):
        folder.metric("evaluation", step=step, tau=2.0)
        folder.metric("evaluation_skipped", step=step - 1, newer=step)
    folder.resume(4, 1.0)
    assert [line["step"] for line in folder.metrics("evaluation")] == [2]
    assert [line["step"] for line in folder.metrics("evaluation_skipped")] == [1, 3]
    folder.resume(2, 0.5)
    assert [line["step"] for line in folder.metrics("resume")] == [4, 2]


def test_metrics_wait_until_those_of_the_run_before_are_dropped_or_gone_on_with(tmp_path: Path) -> None:
    before = RunFolder(tmp_path, Config())
    before.begin()
    before.metric("step", step=0, loss=5.0)
    folder = RunFolder(tmp_path, Config(), "resume")
    folder.metric("stage", stage="load", seconds=1.0)
    assert folder.metrics("step") == [{"step": 0, "loss": 5.0}]
    assert folder.metrics("stage") == []
    folder.resume(1, 1.0)
    assert folder.metrics("stage") == [{"stage": "load", "seconds": 1.0}]
    folder.metric("stage", stage="references", seconds=2.0)
    assert [line["kind"] for line in folder._lines()] == ["step", "resume", "stage", "stage"]
    folder = RunFolder(tmp_path, Config(), "restart")
    folder.metric("stage", stage="load", seconds=3.0)
    assert folder.metrics("step") == [{"step": 0, "loss": 5.0}]
    folder.begin()
    assert folder._lines() == [{"kind": "stage", "stage": "load", "seconds": 3.0}]


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="not empty"):
        RunFolder(tmp_path, Config())
    with pytest.raises(ConfigError, match="cannot be used"):
        RunFolder(tmp_path / "thesis.txt", Config())
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_file_has_its_content_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a power cut could leave the name and no content, in place of the file that was there."""
    path, synced, renamed = tmp_path / "file", list[int](), list[int]()
    fsync, replaced = os.fsync, Path.replace

    def noting_sync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def noting_replace(self: Path, target: Path) -> Path:
        renamed.append(self.stat().st_ino)
        return replaced(self, target)

    monkeypatch.setattr(os, "fsync", noting_sync)
    monkeypatch.setattr(Path, "replace", noting_replace)
    write_json(path, {})
    write_tensors(path, {"a": torch.ones(2)}, {})
    assert synced == renamed
    assert len(renamed) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_tensors_may_be_read_by_whom_the_umask_lets(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_tensors(tmp_path / "file", {"a": torch.ones(2)}, {})
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode


def test_metrics_of_all_threads_are_whole_lines_of_their_kind(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, Config())
    folder.begin()

    def write(index: int) -> None:
        for step in range(50):
            folder.metric(f"kind-{index}", step=step, text="x" * 50)

    threads = [threading.Thread(target=write, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(4):
        assert [m["step"] for m in folder.metrics(f"kind-{index}")] == list(range(50))
    folder.begin()
    assert folder.metrics("kind-0") == []
