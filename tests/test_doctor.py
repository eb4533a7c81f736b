"""`python -m safecompile doctor`: how programs end, what is printed and written, and two rows from beginning to end."""

from __future__ import annotations

import importlib.util
import json
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from safecompile import doctor
from safecompile.__main__ import main
from safecompile.doctor import PatchPoint, Report, Row, Run, Versions, _child
from safecompile.doctor._runner import run_program
from tests.helpers.torch_version import TORCH

# --- how a program ends

MADE_UP = """
from safecompile.doctor._program import HangError, NotApplicableError, fault, program

@program("S1", "made up", kind="silent")
def run(case):
"""

ENDINGS = {
    "healthy": ("return 'as it should be'", "as it should be"),
    "fault": ("fault('seen')", "seen"),
    "hang": ("raise HangError('waits for ever')", "waits for ever"),
    "not applicable": ("raise NotApplicableError('no such machine')", "no such machine"),
    "error": ("return {}[1]", "KeyError: 1"),
}


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Write a module that this process and its children can import."""

    def write(name: str, source: str) -> str:
        Path(tmp_path, f"{name}.py").write_text(source)
        return name

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return write


@pytest.mark.parametrize("outcome", ENDINGS)
def test_a_programs_ending_is_its_outcome(outcome: str, make: Callable[[str, str], str]) -> None:
    body, detail = ENDINGS[outcome]
    module = make(f"made_up_{outcome.replace(' ', '_')}", MADE_UP + textwrap.indent(body, "    "))
    found = _child.run(module, library=False)
    assert (found["outcome"], found["detail"]) == (outcome, detail)
    assert ("return {}[1]" in found.get("output", "")) == (outcome == "error")


def test_in_a_process_of_its_own_a_program_without_the_library_has_nothing_of_it(
    make: Callable[[str, str], str],
) -> None:
    body = "import sys; return ' '.join(name for name in sys.modules if name.startswith('safecompile._')) or 'nothing'"
    module = make("made_up_alone", f"{MADE_UP}    {body}")
    assert replace(run_program(module, "without", limit=60), seconds=0) == Run("healthy", "nothing")


# These end when they are imported, which is before torch is: seconds sooner.
def test_a_signal_is_a_crash(make: Callable[[str, str], str]) -> None:
    module = make("made_up_crash", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    found = run_program(module, "without", limit=60)
    assert (found.outcome, found.detail) == ("crash", "ended by SIGSEGV")
    assert "made_up_crash.py" in found.output  # the stack


def test_a_program_that_does_not_end_is_a_hang_with_its_stacks(make: Callable[[str, str], str]) -> None:
    module = make("made_up_hang", "import threading\ndef waits():\n    threading.Event().wait()\nwaits()")
    found = run_program(module, "without", limit=3)
    assert (found.outcome, found.detail) == ("hang", "did not end within 3 s")
    assert "in waits" in found.output


def test_a_process_that_ends_without_a_result_is_an_error(make: Callable[[str, str], str]) -> None:
    found = run_program(make("made_up_exit", "import os\nos._exit(3)"), "without", limit=60)
    assert (found.outcome, found.detail) == ("error", "ended with exit code 3 and without a result")


# --- what is printed and written

HEALTHY, FAULT = Run("healthy", "", 1.0), Run("fault", "model(x) returned a Proxy", 2.0)
S4 = Row("S4", "returns a Proxy", "silent", "pytorch#112775", protected=True, without=FAULT, with_safecompile=HEALTHY)
S9 = Row("S9", "one budget", "silent", "", protected=False, without=FAULT, with_safecompile=FAULT)
E10 = Row("E10", "a | b", "error", "", protected=True, without=HEALTHY, with_safecompile=HEALTHY)
POINTS = [PatchPoint("fx-patches", "eager calls", "pytorch#112775", "matches")]


def report(*rows: Row, torch: str = "2.13.0+cpu") -> Report:
    return Report(Versions(torch, "3.11.7", "Linux", "0.1.0"), list(rows), POINTS)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[[Report], None]:
    """Let the next examination find this, and run nothing."""

    def let(report: Report) -> None:
        monkeypatch.setattr(doctor, "examine", lambda *_, **__: report)
        monkeypatch.setattr(doctor, "examine_patches", lambda **_: report.patches)

    return let


@pytest.mark.parametrize("outcome", ["fault", "crash", "hang", "error"])
def test_the_exit_code_says_whether_a_protected_row_is_faulty(outcome: Any, found: Callable[[Report], None]) -> None:
    found(report(S4, S9))
    assert main(["doctor"]) == 0
    found(report(replace(S4, with_safecompile=Run(outcome)), S9))
    assert main(["doctor"]) == 1


def test_who_asks_for_some_hazards_sees_of_the_patch_points_what_is_wrong(
    found: Callable[[Report], None], capsys: pytest.CaptureFixture[str]
) -> None:
    found(report())
    main(["doctor", "--quick", "--markdown"])
    assert "fx-patches" not in capsys.readouterr().out
    main(["doctor", "--markdown"])
    assert "fx-patches" in capsys.readouterr().out
    found(
        replace(report(), patches=[*POINTS, replace(POINTS[0], name="exports", state="mismatch", detail="no _Patcher")])
    )
    main(["doctor", "--quick", "--markdown"])
    shown = capsys.readouterr().out
    assert "exports" in shown
    assert "fx-patches" not in shown


def test_the_exit_code_of_patches_says_whether_one_does_not_match(found: Callable[[Report], None]) -> None:
    found(report())
    assert main(["doctor", "--patches"]) == 0
    found(replace(report(), patches=[*POINTS, replace(POINTS[0], state="mismatch", detail="no _Patcher")]))
    assert main(["doctor", "--patches"]) == 1


@pytest.mark.parametrize(
    "arguments",
    [[], ["doctor", "--only", "X1"], ["doctor", "--jobs", "0"], ["doctor", "--quick", "--only", "S4"], ["surgeon"]],
    ids=" ".join,
)
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_without_the_extra_an_error_names_it_and_what_works_without(
    found: Callable[[Report], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found(report(S4))
    with pytest.raises(SystemExit) as caught:
        main(["doctor"])
    assert caught.value.code == 2
    assert 'pip install "safecompile[doctor]"' in capsys.readouterr().err
    assert main(["doctor", "--markdown"]) == main(["doctor", "--json", "-"]) == 0


def test_json_has_all_and_can_be_read_again(
    found: Callable[[Report], None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    whole = report(S4, S9, E10)
    found(whole)
    assert main(["doctor", "--json", "-"]) == 0
    text = capsys.readouterr().out
    assert Report.from_json(text) == whole
    row = json.loads(text)["rows"][0]
    assert row["with"] == {"outcome": "healthy", "detail": "", "seconds": 1.0, "output": ""}
    assert row["without"]["detail"] == "model(x) returned a Proxy"
    file = Path(tmp_path, "result.json")
    assert main(["doctor", "--json", str(file), "--markdown"]) == 0
    assert Report.from_json(file.read_text()) == whole


def test_the_tables_say_what_was_seen(found: Callable[[Report], None], capsys: pytest.CaptureFixture[str]) -> None:
    found(report(S4, S9, E10))
    main(["doctor", "--markdown"])
    lines = capsys.readouterr().out.splitlines()
    assert "| S4 | silent | returns a Proxy | fault: model(x) returned a Proxy | healthy |" in lines
    assert "| E10 | error | a \\| b | healthy | healthy |" in lines
    assert any("(not protected yet)" in line for line in lines if line.startswith("| S9"))
    assert "| fx-patches | matches | eager calls | pytorch#112775 |" in lines
    assert lines[-1] == "torch alone: 2 of 3 hazards seen; no protected row is faulty with safecompile"
    main(["doctor"])
    assert "model(x) returned a Proxy" in capsys.readouterr().out


def test_merged_results_are_a_table_of_rows_by_versions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(Path(tmp_path, name)) for name in ("new.json", "old.json")]
    Path(files[0]).write_text(report(E10, S4, torch="2.13.0+cpu").to_json())
    Path(files[1]).write_text(report(S9, S4, torch="2.8.0").to_json())
    assert main(["doctor", "--merge", *files]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "|  | hazard | 2.8.0 | 2.13.0 |",
        "| --- | --- | --- | --- |",
        "| S4 | returns a Proxy | fault → healthy | fault → healthy |",
        "| S9 | one budget | fault → fault |  |",
        "| E10 | a \\| b |  | healthy → healthy |",
    ]


@pytest.mark.parametrize("text", ["{}", "[]", "no JSON", '{"schema": 1}'])
def test_what_is_no_result_is_not_merged(text: str, tmp_path: Path) -> None:
    file = Path(tmp_path, "result.json")
    file.write_text(text)
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--merge", str(file)])
    assert caught.value.code == 2


# --- the programs

ROWS = [f"S{n}" for n in range(1, 12)] + ["P1", "P2", "C2", "C3", "D1", "D2", "D3"]
ROWS += [f"E{n}" for n in range(1, 11)] + ["T1", "T2"]


def test_every_hazard_is_listed_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ROWS


def test_each_program_can_be_found_by_its_row_and_says_what_a_user_sees() -> None:
    for id_, program in doctor.all_programs().items():
        module = importlib.import_module(program.run.__module__)
        assert program.module.startswith(f"{id_.lower()}_") and module.__doc__


@pytest.mark.hang_timeout(240)
def test_two_rows_from_beginning_to_end(tmp_path: Path) -> None:
    file = Path(tmp_path, "result.json")
    assert main(["doctor", "--only", "s6, E2", "--json", str(file)]) == 0
    result = Report.from_json(file.read_text())
    assert [row.id for row in result.rows] == ["S6", "E2"]
    for row in result.rows:
        without = "healthy" if row.id == "S6" and TORCH < (2, 13) else "fault"
        assert (row.without.outcome, row.with_safecompile.outcome) == (without, "healthy"), row
    assert "is not installed as a submodule" in result.rows[1].without.detail
    assert "fx-patches" in [point.name for point in result.patches if point.state == "matches"]
    assert not any(point.state == "mismatch" for point in result.patches), result.patches
