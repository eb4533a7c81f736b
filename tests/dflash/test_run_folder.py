"""A run folder belongs to one configuration, and its files are whole."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from config import Config, ConfigError
from run_folder import RunFolder


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


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="not empty"):
        RunFolder(tmp_path, Config())
    with pytest.raises(ConfigError, match="cannot be used"):
        RunFolder(tmp_path / "thesis.txt", Config())
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


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
