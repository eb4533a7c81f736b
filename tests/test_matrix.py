"""The results of the suite on several torch versions, kept as JSON and put together."""

from __future__ import annotations

from pathlib import Path

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
