from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import figures, pieces, plots, report, run
from benchmarks.pieces.herd import herd
from benchmarks.pieces.load import load
from benchmarks.pieces.variants import CountingBackend, compile_as, new_function
from tests.helpers.threads import run_threads


def in_this_process(self: run.Bench, piece: str, **options: object) -> run.Result:
    """Run a piece as JSON in and JSON out, without the seconds that importing torch takes."""
    return json.loads(json.dumps(pieces.run(piece, json.loads(json.dumps(options)))))


@pytest.fixture(scope="module")
def runs() -> dict[str, run.Result]:
    """By piece, its quick run, which is made once."""
    return {}


def quick_run(piece: str, runs: dict[str, run.Result], folder: Path, monkeypatch: pytest.MonkeyPatch) -> run.Result:
    if piece not in runs:
        monkeypatch.setattr(run.Bench, "run", in_this_process)
        run.main(["--quick", "--backend=aot_eager", f"--only={piece}", f"--output={folder}"])
        runs[piece] = json.loads((folder / "results.json").read_text())
    return runs[piece]


@pytest.mark.hang_timeout(180)
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("piece", report.TABLES)
def test_a_quick_run_measures_and_reports_and_draws_a_piece(
    piece: str,
    runs: dict[str, run.Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib")
    written = quick_run(piece, runs, tmp_path, monkeypatch)
    assert written["schema"] == run.SCHEMA
    result = written["results"][piece]
    printed = capsys.readouterr().out
    assert written["machine"]["torch"] in printed
    assert report.table(written, piece).text() in printed
    assert [path.stem for path in tmp_path.glob("*.png")] == [piece] * (piece in plots.PLOTS)
    if piece in plots.PLOTS:
        assert shown_by(tmp_path / f"{piece}.png") == plots.digest(written)
    if piece == "herd":
        cells = report.herd_ratios(result)["safecompile"].values()
        assert [cell[1:] for cell in cells] == [(1, 0)] * len(cells), "one compile and no errors"
    if piece == "beside":
        assert all(failed == 0 for _, variant, *_, failed in report.beside_waits(result) if variant == "safecompile")
    if piece == "load":
        assert result["safecompile"]["errors"] == result["safecompile_eager"]["errors"] == 0
        assert result["safecompile"]["compiles"] == result["safecompile"]["shapes_compiled"] == 2


@pytest.mark.hang_timeout(300)
@pytest.mark.usefixtures("fresh_dynamo")
def test_the_figures_of_a_run_are_put_between_the_markers(
    runs: dict[str, run.Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    each = [quick_run(piece, runs, tmp_path, monkeypatch) for piece in report.TABLES]
    whole = {**each[0], "results": {piece: result for one in each for piece, result in one["results"].items()}}
    assert "| 1 | 1 |" in report.targets(whole).markdown().splitlines()[2], "one graph for eight threads"
    for path, images in figures.PAGES.items():
        page = path.read_text()
        changed = figures.inserted(page, whole, images)
        assert figures.NOTHING not in changed
        assert report.machine(whole) in changed
        assert report.targets(whole).markdown() in changed
        assert f"]({images}/herd.png)" in changed
        assert figures.inserted(changed, figures.kept(), images) == page, "only what is between markers changes"


def test_a_run_that_cannot_be_quoted_is_refused() -> None:
    whole: run.Result = {"schema": run.SCHEMA, "quick": False, "results": dict.fromkeys(report.TABLES)}
    assert figures.checked(whole) is whole
    with pytest.raises(SystemExit, match="quick run"):
        figures.checked({**whole, "quick": True})
    with pytest.raises(SystemExit, match="lack beside, checkpoint"):
        figures.checked({**whole, "results": dict.fromkeys(report.TABLES.keys() - {"beside", "checkpoint"})})
    with pytest.raises(SystemExit, match="schema 0"):
        figures.checked({**whole, "schema": 0})


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
def test_copies_share_no_graph_even_where_threads_come_one_after_the_other() -> None:
    counting, x = CountingBackend("aot_eager"), torch.ones(8, 8)
    function = compile_as("copies", new_function(1), backend=counting)
    for _ in range(2):
        run_threads([lambda: function(x)])
    assert len(counting.shapes) == 2


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
    names = set(re.findall(r"<!-- figures: (\S+) -->", (run.ROOT / "docs/benchmarks.md").read_text()))
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
        return str(image.text[plots.KEY])
