"""A disk that is full at the end of a run is said in a sentence; what can still be written is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the example's target is a transformers model")
pytest.importorskip("rich", reason="the example's display")
pytest.importorskip("matplotlib", reason="the example's plots")

from safetensors import SafetensorError

import demo
import train
from interrupt import Interrupted
from prepare import load_targets
from replica import Replica
from run_folder import RunFolder
from tests.dflash.conftest import EXAMPLE
from tests.dflash.test_demo import arguments
from tests.helpers.subprocess_run import run_forked

FULL = "No space left on device"


@pytest.fixture
def given(tiny_target: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "counting.txt").write_text(" ".join(str(i) for i in range(500)))
    return arguments(tiny_target, tmp_path / "text", tmp_path / "run")


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


FILES_OF_AT_MOST_20_KB = """
import resource, signal, sys
sys.path.insert(0, sys.argv[1])
import torch
torch._dynamo.config.disable = True  # compiles are most of so short a run
import demo, train
from safetensors import SafetensorError

run = train.Training.run
def limited(self, report, tick):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    run(self, report, tick)
train.Training.run = limited
demo.leave(demo.main(sys.argv[2:]))
"""


@pytest.mark.parametrize("save_every", ["3", "100"])
def test_a_checkpoint_that_does_not_fit_ends_the_run_with_a_summary(
    given: list[str], tmp_path: Path, save_every: str
) -> None:
    """Whether it is saved in a drafter's thread or, at the end, in the main one."""
    result = run_forked(FILES_OF_AT_MOST_20_KB, [str(EXAMPLE), *given, "--save-every", save_every], timeout=120)
    assert result.rc == 1
    assert f"step {min(8, int(save_every))} could not be saved: " in result.stderr
    assert "stopped: " in result.stderr
    if save_every == "100":
        assert "Traceback" not in result.stderr
    found = summary(tmp_path / "run")
    assert found["status"] == "failed"
    assert "File too large" in found["error"]
    assert found["training"]["saved_step"] == 0


def test_a_summary_that_does_not_fit_is_said_and_is_no_success(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo.Run, "complete", lambda self: [])
    write = RunFolder.write_json

    def full(self: RunFolder, name: str, content: Any) -> None:
        if name == "summary.json":
            raise OSError(FULL)
        write(self, name, content)

    monkeypatch.setattr(RunFolder, "write_json", full)
    assert demo.main(given) == 1
    printed = capsys.readouterr()
    assert printed.err == f"summary.json could not be written: {FULL}\n"
    assert "all checks passed" not in printed.out


def test_an_interrupted_run_whose_state_cannot_be_saved_does_not_say_that_it_was(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(self: demo.Run) -> list[str]:
        self.training = train.Training(
            self.config, self._train_on, load_targets(self.config, self.taps, self.language, 5)
        )
        raise Interrupted(2)

    def full(self: demo.Run, replica: Replica, *, final: bool = False) -> None:
        raise SafetensorError(FULL)

    monkeypatch.setattr(demo.Run, "complete", interrupted)
    monkeypatch.setattr(demo.Run, "_save", full)
    assert demo.main(given) == 130
    said = capsys.readouterr().err
    assert f"step 0 could not be saved: {FULL}" in said
    assert "not all there is could be saved" in said
