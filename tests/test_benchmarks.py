from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import figures, pieces, plots, report, run
from benchmarks.pieces.herd import herd
from benchmarks.pieces.load import load


def in_this_process(self: run.Bench, piece: str, **options: object) -> run.Result:
    """Run a piece as JSON in and JSON out, without the seconds that importing torch takes."""
    return json.loads(json.dumps(pieces.run(piece, json.loads(json.dumps(options)))))


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_quick_run_measures_and_reports_and_draws_every_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(run.Bench, "run", in_this_process)

    run.main(["--quick", "--backend=aot_eager", f"--output={tmp_path}"])

    written = json.loads((tmp_path / "results.json").read_text())
    assert written["schema"] == run.SCHEMA
    assert set(written["results"]) == set(report.TABLES)
    printed = capsys.readouterr().out
    assert written["machine"]["torch"] in printed
    assert "What the library is to keep to" in printed
    for cell in report.herd_ratios(written["results"]["herd"])["safecompile"].values():
        assert cell[1:] == (1, 0), "one compile and no errors"
    for _, variant, *_, failed in report.beside_waits(written["results"]["beside"]):
        assert variant == "stock" or failed == 0
    assert written["results"]["load"]["safecompile"]["errors"] == 0
    assert {path.stem for path in tmp_path.glob("*.png")} == set(plots.PLOTS)
    for name in plots.PLOTS:
        assert shown_by(tmp_path / f"{name}.png") == plots.digest(written)
    check_that_the_pages_show(written, monkeypatch)


def check_that_the_pages_show(written: run.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="quick run"):
        figures.checked(written)
    with pytest.raises(SystemExit, match="lack herd"):
        figures.checked({**written, "results": {k: v for k, v in written["results"].items() if k != "herd"}})
    with pytest.raises(SystemExit, match="schema 0"):
        figures.checked({**written, "schema": 0})
    for path, images in figures.PAGES.items():
        page = path.read_text()
        changed = figures.inserted(page, written, images)
        assert figures.NOTHING not in changed
        assert figures.inserted(changed, figures.kept(), images) == page, "only what is between markers changes"
        assert report.machine(written) in changed
        assert f"]({images}/herd.png)" in changed
    readme = figures.inserted((figures.ROOT / "README.md").read_text(), written, "docs/images")
    one_compile = next(line for line in readme.splitlines() if line.startswith("| 8 threads make the first call"))
    assert one_compile.endswith("| 1 | 1 |")


def test_a_piece_runs_in_a_process_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    run.main(["--quick", "--only=imports"])

    assert "P6 Imports" in capsys.readouterr().out


@pytest.mark.parametrize(("variant", "compiles"), [("lock", 1), ("first_call", 1), ("copies", 3), ("safecompile", 1)])
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_variant_compiles_as_often_as_its_description_says(variant: str, compiles: int) -> None:
    """How often stock does is a matter of luck: tests/test_single_flight.py has its schedule."""
    measured: Any = herd(variant=variant, backend="aot_eager", threads=[3], rounds=1)
    assert measured["rounds"][0]["3"]["compiles"] == compiles
    assert measured["rounds"][0]["3"]["errors"] == []


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_load_finds_wrong_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured() -> int:
        result = load(variant="stock", backend="aot_eager", clients=1, rate=20, shapes=1, interval=0.2)
        return int(result["errors"])

    assert measured() == 0
    monkeypatch.setattr("benchmarks.pieces.load.compile_as", lambda _, function, **options: lambda x: function(x) + 1)
    assert measured() == 4


def test_the_pages_show_the_results_that_are_kept() -> None:
    kept = figures.kept()
    if kept is not None:
        figures.checked(kept)
    for path, images in figures.PAGES.items():
        page = path.read_text()
        assert page.count("<!-- figures: ") == len(figures.MARKED.findall(page)) > 0, "a marker has lost its pair"
        assert page == figures.inserted(page, kept, images), f"python -m benchmarks.figures has not been run: {path}"
    names = set(re.findall(r"<!-- figures: (\S+) -->", (figures.ROOT / "docs/benchmarks.md").read_text()))
    assert names >= report.TABLES.keys()


@pytest.mark.skipif(not figures.RESULTS.exists(), reason="no run is kept")
@pytest.mark.skipif(importlib.util.find_spec("PIL") is None, reason="needs Pillow, which comes with matplotlib")
@pytest.mark.parametrize("name", plots.PLOTS)
def test_a_plot_is_of_the_results_that_are_kept(name: str) -> None:
    kept = figures.kept()
    assert kept is not None
    assert shown_by(figures.IMAGES / f"{name}.png") == plots.digest(kept)


def shown_by(plot: Path) -> str:
    from PIL import Image

    with Image.open(plot) as image:
        return str(image.text[plots.KEY])  # type: ignore[attr-defined]
