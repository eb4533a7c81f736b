"""Keep how the suite and the doctor end on one torch as JSON, and put several of these together as Markdown.

python tests/matrix.py run RESULTS       in an environment that has that torch: `make matrix VERSION=2.8.0`
python tests/matrix.py merge RESULTS     the tables of all torches in the folder
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
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
    results.sort(key=lambda result: [int(part) for part in result["torch"].split("+")[0].split(".")])
    lines = [f"| torch | Python | {' | '.join(OUTCOMES)} |", f"|{' --- |' * (2 + len(OUTCOMES))}"]
    for result in results:
        counts = " | ".join(str(result["tests"][outcome]) for outcome in OUTCOMES)
        lines.append(f"| {result['torch']} | {result['python']} | {counts} |")
    with tempfile.TemporaryDirectory() as temporary:
        files = [str(Path(temporary, f"{number}.json")) for number in range(len(results))]
        for file, result in zip(files, results, strict=True):
            Path(file).write_text(json.dumps(result["doctor"]))
        command = [sys.executable, "-m", "safecompile", "doctor", "--merge", *files]
        faults = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return "\n".join([*lines, "", faults])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "merge"])
    parser.add_argument("results", type=Path, help="folder of the JSON files")
    options, rest = parser.parse_known_args()
    if options.what == "run":
        return run(options.results, rest)
    print(merged(options.results))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
