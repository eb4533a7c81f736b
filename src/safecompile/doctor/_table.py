"""The doctor's tables: for a terminal, with rich, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from safecompile.doctor._report import PatchPoint, Report, Row, Run

__all__ = ["markdown", "patch_lines", "print_table", "report_lines", "verdict"]

Lines = tuple[list[str], list[list[str]]]

_STATES = {
    "matches": "matches",
    "not needed": "not needed: repaired upstream / not in this torch",
    "mismatch": "MISMATCH",
}
_COLOURS = {"healthy": "green", "matches": "green", "not applicable": "dim", "not needed": "dim"}


def report_lines(report: Report) -> Lines:
    """Return headings and lines of the table of hazards."""
    return (
        ["", "kind", "hazard", "torch alone", "with safecompile"],
        [[row.id, row.kind, row.title, _run(row.without), _with(row)] for row in report.rows],
    )


def _with(row: Row) -> str:
    promise = "" if row.protected else " (not protected yet)"
    return _run(row.with_safecompile) + promise


def _run(run: Run) -> str:
    return f"{run.outcome}: {run.detail}" if run.detail else run.outcome


def patch_lines(points: Iterable[PatchPoint]) -> Lines:
    """Return headings and lines of the table of patch points."""
    return (
        ["patch point", "this torch", "protects from", "upstream"],
        [
            [one.name, _STATES[one.state] + (f": {one.detail}" if one.detail else ""), one.protects, one.upstream]
            for one in points
        ],
    )


def verdict(report: Report) -> str:
    """Return one line for all."""
    failed = [row.id for row in report.rows if row.failed]
    without = sum(row.without.bad for row in report.rows)
    ends = f"faulty with safecompile: {', '.join(failed)}" if failed else "no protected row is faulty with safecompile"
    return f"torch alone: {without} of {len(report.rows)} hazards seen; {ends}"


def markdown(table: Lines) -> str:
    """Return a table as Markdown."""
    headings, lines = table
    rows = [headings, ["---"] * len(headings), *lines]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)


def print_table(table: Lines, title: str) -> None:
    """Print a table to the terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    headings, lines = table
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a file or a pipe has no width, and 80 columns are too narrow
    shown = Table(*headings, title=title, title_justify="left")
    for line in lines:
        shown.add_row(*(Text(cell, style=_style(cell)) for cell in line))
    console.print(shown)


def _style(cell: str) -> str:
    for start, colour in _COLOURS.items():
        if cell.startswith(start):
            return colour
    bad: Sequence[str] = ("fault", "crash", "hang:", "error:", "MISMATCH")
    return "red" if cell.startswith(tuple(bad)) else ""
