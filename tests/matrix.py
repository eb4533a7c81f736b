"""Keep how the suite and the doctor end on one torch as JSON, and put several of these together as Markdown.

python tests/matrix.py run RESULTS       in an environment that has that torch: `make matrix VERSION=2.8.0`
python tests/matrix.py merge RESULTS     the tables of all torches in the folder
python tests/matrix.py docs RESULTS      write what the doctor found into docs/faults, and what is made of it: docs/faults.md and
                                         the tables of README.md and docs/thread-safety.md
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE, REPORTS = ROOT / "docs/faults.md", ROOT / "docs/faults"
README, PROMISES = ROOT / "README.md", ROOT / "docs/thread-safety.md"
OUTCOMES = ("passed", "failed", "xfailed", "skipped")


def tests(arguments: list[str]) -> dict[str, Any]:
    """Run pytest; return the counts of the outcomes, which tests failed, and the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", f"--junitxml={report}", *arguments]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        cases = list(ET.parse(report).getroot().iter("testcase")) if report.exists() else []
    counts = dict.fromkeys(OUTCOMES, 0)
    failed = []
    for case in cases:
        outcome = _outcome(case)
        counts[outcome] += 1
        if outcome == "failed":
            failed.append(f"{case.get('classname')}::{case.get('name')}")
    return {**counts, "failures": failed, "exit_code": code, "seconds": sum(float(c.get("time", 0)) for c in cases)}


def _number(version: str) -> list[int]:
    return [int(part) for part in version.split("+", maxsplit=1)[0].split(".")]


def _version_of(report: dict[str, Any]) -> list[int]:
    return _number(report["versions"]["torch"])


def _outcome(case: ET.Element) -> str:
    skipped = case.find("skipped")
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    if skipped is None:
        return "passed"
    return "xfailed" if skipped.get("type") == "pytest.xfail" else "skipped"


def doctor(folder: Path) -> dict[str, Any]:
    """Run the doctor; return its own JSON."""
    out = Path(folder, "doctor.json")
    subprocess.run([sys.executable, "-m", "safecompile", "doctor", "--json", str(out)], cwd=ROOT, check=False)
    result: dict[str, Any] = json.loads(out.read_text())
    out.unlink()
    return result


def run(folder: Path, arguments: list[str]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    result = {"torch": version("torch"), "python": platform.python_version(), "platform": platform.platform()}
    suite = tests(arguments)
    whole = {**result, "tests": suite, "doctor": doctor(folder)}
    Path(folder, f"torch-{version('torch').split('+')[0]}.json").write_text(json.dumps(whole, indent=1) + "\n")
    return int(suite["exit_code"])


def merged(folder: Path) -> str:
    """Return a table of the suites, and the doctor's of the faults, by torch version."""
    results = [json.loads(path.read_text()) for path in folder.glob("torch-*.json")]
    results.sort(key=lambda result: _number(result["torch"]))
    lines = [f"| torch | Python | {' | '.join(OUTCOMES)} |", f"|{' --- |' * (2 + len(OUTCOMES))}"]
    for result in results:
        counts = " | ".join(str(result["tests"][outcome]) for outcome in OUTCOMES)
        lines.append(f"| {result['torch']} | {result['python']} | {counts} |")
    return "\n".join([*lines, "", faults(result["doctor"] for result in results)])


def faults(reports: Iterable[dict[str, Any]]) -> str:
    """Return the doctor's table of several reports."""
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for number, report in enumerate(reports):
            files.append(Path(folder, f"{number}.json"))
            files[-1].write_text(json.dumps(report))
        command = [sys.executable, "-m", "safecompile", "doctor", "--merge", *map(str, files)]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def keep(folder: Path) -> None:
    """Keep the doctor's reports among the docs, without what belongs to one machine and one run."""
    REPORTS.mkdir(exist_ok=True)
    for path in folder.glob("torch-*.json"):
        report = json.loads(path.read_text())["doctor"]
        for row in report["rows"]:
            for ended in (row["without"], row["with"]):
                ended.update(output="", seconds=0.0)
        report["versions"]["platform"] = report["versions"]["platform"].partition("-")[0]
        Path(REPORTS, path.name).write_text(json.dumps(report, indent=1) + "\n")


def kept() -> list[dict[str, Any]]:
    """Return the reports among the docs, oldest torch first."""
    return sorted((json.loads(path.read_text()) for path in REPORTS.glob("torch-*.json")), key=_version_of)


def _torch(report: dict[str, Any]) -> str:
    return str(report["versions"]["torch"]).partition("+")[0]


def _rows(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row of each hazard, of the newest torch, in the order of the newest report."""
    rows = {row["id"]: row for report in reversed(reports) for row in reversed(report["rows"])}
    order = [row["id"] for report in reversed(reports) for row in report["rows"]]
    return [rows[id_] for id_ in dict.fromkeys(order)]


def page() -> str:
    """Return the page of the docs that shows which torch has which fault."""
    reports = kept()
    promised = {row["id"]: row["protected"] for report in reports for row in report["rows"]}
    unkept = [id_ for id_, kept in promised.items() if not kept]
    made = [f"torch {one['versions']['torch']} with Python {one['versions']['python']}" for one in reports]
    return PAGE_TEXT.format(
        made=", ".join(made),
        table=faults(reports),
        open=f" Not promised yet: {', '.join(unkept)}." if unkept else "",
        seen=seen(reports),
    )


def seen(reports: list[dict[str, Any]]) -> str:
    """Return what the doctor said of each hazard on the newest torch that has it."""
    lines = ["|  | torch | what was seen on torch alone |", "| --- | --- | --- |"]
    found: dict[str, str] = {}
    for report in reports:
        for row in report["rows"]:
            if row["without"]["outcome"] in ("fault", "crash", "hang"):
                found[row["id"]] = (
                    f"| {row['id']} | {_torch(report)} | {row['without']['detail'].replace('|', '&#124;')} |"
                )
    lines += [found[row["id"]] for row in _rows(reports) if row["id"] in found]
    return "\n".join(lines)


def short(reports: list[dict[str, Any]]) -> str:
    """Return the README's table: each hazard on torch alone by version, and what is left of it with safecompile."""
    versions = [_torch(report) for report in reports]
    lines = [f"|  | hazard | {' | '.join(versions)} | with safecompile |", f"|{' --- |' * (3 + len(versions))}"]
    names = {"healthy": "-", "not applicable": "not run"}
    for one in _rows(reports):
        cells, left, ran = [], [], False
        for report in reports:
            row = next((row for row in report["rows"] if row["id"] == one["id"]), None)
            outcome, protected = (row["without"]["outcome"], row["with"]["outcome"]) if row else ("not applicable",) * 2
            cells.append(names.get(outcome, outcome))
            ran = ran or protected != "not applicable"
            if protected not in names:
                left.append(f"{protected} on {_torch(report)}")
        lines.append(
            f"| {one['id']} | {one['title']} | {' | '.join(cells)} | {', '.join(left) or ('healthy' if ran else 'not run')} |"
        )
    return "\n".join(lines)


def by_version(reports: list[dict[str, Any]]) -> str:
    """Return for each torch which hazards the doctor met in it, and which were left with safecompile."""
    lines = ["| torch | Python | met on torch alone | met with safecompile | not run here |", f"|{' --- |' * 5}"]
    for report in reports:
        without: list[str] = []
        left: list[str] = []
        idle: list[str] = []
        for row in report["rows"]:
            for outcome, ids in ((row["without"]["outcome"], without), (row["with"]["outcome"], left)):
                if outcome not in ("healthy", "not applicable"):
                    ids.append(row["id"])
            if row["without"]["outcome"] == "not applicable":
                idle.append(row["id"])
        cells = [", ".join(ids) or "none" for ids in (without, left, idle)]
        lines.append(f"| {report['versions']['torch']} | {report['versions']['python']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def put(text: str, table: str) -> str:
    """Replace what stands between the two marks in a page.

    Raises:
        ValueError: it has no such marks.
    """
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"the page has no part between {START} and {END}")
    return f"{before}{start}\n\n{table}\n\n{end}{after}"


START, END = "<!-- made by tests/matrix.py docs -->", "<!-- until here -->"

PAGE_TEXT = """\
# Faults by version

Each cell says what `python -m safecompile doctor` saw on torch alone → with safecompile ({made}).
The letter of a row says what kind of fault it is: **S**ilent wrong numbers, a **P**rocess broken for good, a **C**rash,
**D** a hang, an **E**rror, **T** slow. S8 and E9 need a GPU, C3 a CUDA build on a machine without one.{open}

{table}
## What was seen

In the doctor's words, on the newest of these versions that has the fault.

{seen}

*Generated by `python tests/matrix.py docs matrix` from the doctor's results in `docs/faults`; `make matrix` makes them.*
"""


def write_pages() -> None:
    """Write all that is made of the reports among the docs."""
    PAGE.write_text(page())
    README.write_text(put(README.read_text(), short(kept())))
    PROMISES.write_text(put(PROMISES.read_text(), by_version(kept())))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "merge", "docs"])
    parser.add_argument("results", type=Path, help="folder of the JSON files")
    options, rest = parser.parse_known_args()
    if options.what == "run":
        return run(options.results, rest)
    if options.what == "docs":
        keep(options.results)
        write_pages()
        return 0
    print(merged(options.results))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
