"""What the doctor found: plain data, and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["PatchPoint", "Report", "Row", "Run", "Versions", "merged"]

SCHEMA = 1

Outcome = Literal["healthy", "fault", "crash", "hang", "error", "not applicable"]


@dataclass(frozen=True)
class Run:
    """How one program ended."""

    outcome: Outcome
    detail: str = ""
    """What was seen, in one line."""
    seconds: float = 0.0
    output: str = ""
    """What a program that crashed, hung or failed has written: stacks, mostly."""

    @property
    def bad(self) -> bool:
        """Whether the hazard was seen, or the program could not tell."""
        return self.outcome not in ("healthy", "not applicable")


@dataclass(frozen=True)
class Row:
    """One hazard, on torch alone and with safecompile."""

    id: str
    title: str
    kind: str
    upstream: str
    protected: bool
    """Whether safecompile promises that it is healthy."""
    without: Run
    with_safecompile: Run

    @property
    def failed(self) -> bool:
        """Whether a promise is broken."""
        return self.protected and self.with_safecompile.bad


@dataclass(frozen=True)
class PatchPoint:
    """One place in torch that safecompile changes."""

    name: str
    protects: str
    upstream: str
    state: Literal["matches", "not needed", "mismatch"]
    detail: str = ""


@dataclass(frozen=True)
class Versions:
    """Where the report was made."""

    torch: str
    python: str
    platform: str
    safecompile: str

    def __str__(self) -> str:
        return f"torch {self.torch}, Python {self.python}, {self.platform}, safecompile {self.safecompile}"


@dataclass(frozen=True)
class Report:
    """All that was found."""

    versions: Versions
    rows: Sequence[Row]
    patches: Sequence[PatchPoint]

    @property
    def failed(self) -> bool:
        """Whether a protected row is faulty with safecompile."""
        return any(row.failed for row in self.rows)

    def to_json(self) -> str:
        """Write the report as JSON."""
        rows = [asdict(row) for row in self.rows]
        for row in rows:
            row["with"] = row.pop("with_safecompile")
        whole = {"schema": SCHEMA, "versions": asdict(self.versions), "rows": rows}
        return json.dumps({**whole, "patches": [asdict(point) for point in self.patches]}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read a report.

        Raises:
            ValueError: it is no report of this doctor.
        """
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise ValueError(f"no report of this doctor (schema {SCHEMA})")
        return cls(
            Versions(**data["versions"]),
            [_row(row) for row in data["rows"]],
            [PatchPoint(**point) for point in data["patches"]],
        )


def _row(data: dict[str, Any]) -> Row:
    own = {name: value for name, value in data.items() if name not in ("with", "without")}
    return Row(**own, without=Run(**data["without"]), with_safecompile=Run(**data["with"]))


def merged(reports: Iterable[Report]) -> tuple[list[str], list[list[str]]]:
    """Put reports of several torch versions side by side; return the headings and the lines of the table."""
    reports = sorted(reports, key=lambda report: _number(report.versions.torch))
    headings = [_plain(report.versions.torch) for report in reports]
    if len(set(headings)) < len(headings):
        headings = [f"{_plain(one.versions.torch)}, Python {one.versions.python}" for one in reports]
    by_id = [{row.id: row for row in report.rows} for report in reports]
    first = {id_: row for rows in reversed(by_id) for id_, row in rows.items()}
    order = sorted(first, key=place)
    lines = [[id_, first[id_].title, *(_cell(rows.get(id_)) for rows in by_id)] for id_ in order]
    return ["", "hazard", *headings], lines


def place(id_: str) -> tuple[int, int]:
    """Return where a hazard stands in a table: in order of harm, as its letter, and then by its number."""
    return "SPCDET".index(id_[0]), int(id_[1:])


def _cell(row: Row | None) -> str:
    return f"{row.without.outcome} → {row.with_safecompile.outcome}" if row else ""


def _plain(version: str) -> str:
    return version.partition("+")[0]


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in _plain(version).split(".")[:3] if part.isdigit())
