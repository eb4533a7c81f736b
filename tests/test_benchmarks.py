from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks import pieces, run

if TYPE_CHECKING:
    from pathlib import Path


def in_this_process(self: run.Bench, piece: str, **options: object) -> run.Result:
    """Run a piece as JSON in and JSON out, without the seconds that importing torch takes."""
    result = pieces.PIECES[piece](**json.loads(json.dumps(options)))
    return json.loads(json.dumps(result))


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_quick_run_measures_and_reports_every_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run.Bench, "run", in_this_process)

    run.main(["--quick", "--backend=aot_eager", f"--json={tmp_path / 'results.json'}"])

    written = json.loads((tmp_path / "results.json").read_text())
    assert set(written["results"]) == set(run.REPORTS)
    assert written["machine"]["torch"] in capsys.readouterr().out
    for herd in written["results"]["herd"]["runs"]:
        assert herd["safecompile"]["compiles"] == 1
        assert herd["safecompile"]["errors"] == []
    for waits in written["results"]["beside"]["safecompile"].values():
        assert all(wait["failed"] == 0 for wait in waits)


def test_a_piece_runs_in_a_process_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    run.main(["--quick", "--only=imports"])

    assert "safecompile after it" in capsys.readouterr().out
