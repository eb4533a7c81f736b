"""The results of the suite on several torch versions, kept as JSON and put together."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import matrix

SUITE = """
import pytest

def test_good(): pass
def test_bad(): raise ValueError
@pytest.mark.xfail
def test_expected(): raise ValueError
@pytest.mark.skip
def test_skipped(): pass
@pytest.fixture
def broken(): raise ValueError
def test_error(broken): pass
"""


def test_outcomes_are_counted_and_failures_named(tmp_path: Path) -> None:
    path = tmp_path / "test_made_up.py"
    path.write_text(SUITE)
    result = matrix.tests([str(path), "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-o", "addopts="])
    assert {name: result[name] for name in matrix.OUTCOMES} == {"passed": 1, "failed": 2, "xfailed": 1, "skipped": 1}
    assert [name.rpartition("::")[2] for name in result["failures"]] == ["test_bad", "test_error"]
    assert result["exit_code"] == 1


def test_a_run_that_collects_nothing_is_no_success(tmp_path: Path) -> None:
    assert matrix.tests([str(tmp_path), "-p", "no:cacheprovider", "-o", "addopts="])["exit_code"] == 5


def test_the_page_of_faults_is_what_the_reports_say() -> None:
    assert matrix.PAGE.read_text() == matrix.page()


def test_the_tables_of_the_other_pages_are_what_the_reports_say() -> None:
    reports = matrix.kept()
    for path, table in ((matrix.README, matrix.short(reports)), (matrix.PROMISES, matrix.by_version(reports))):
        text = path.read_text()
        assert matrix.put(text, table) == text


def test_the_tables_tell_a_fault_from_a_healthy_row() -> None:
    row = {"id": "E1", "title": "a call is refused", "without": {"outcome": "crash", "detail": "a | b"}}
    old, new = (
        {"versions": {"torch": f"{version}+cpu", "python": "3.11.7"}, "rows": [{**row, "with": {"outcome": outcome}}]}
        for version, outcome in (("2.8.0", "healthy"), ("2.11.0", "fault"))
    )
    assert "| E1 | a call is refused | crash | crash | fault on 2.11.0 |" in matrix.short([old, new])
    assert "| 2.8.0+cpu | 3.11.7 | E1 | none | none |" in matrix.by_version([old, new])
    assert "| E1 | 2.11.0 | a &#124; b |" in matrix.seen([old, new])


def test_a_page_without_the_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="no part between"):
        matrix.put("text", "table")
