"""``python -m safecompile doctor``."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from safecompile import doctor
from safecompile.doctor import _table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m safecompile", description="Tools for torch.compile under threads.")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser(
        "doctor",
        help="show which hazards this torch has, without and with safecompile",
        description="Run each hazard in processes of its own, on torch alone and with safecompile. "
        "The exit code is 0 if no protected row is faulty with safecompile, 1 otherwise, and 2 for wrong usage.",
    )
    which = one.add_mutually_exclusive_group()
    which.add_argument("--quick", action="store_true", help=f"only {', '.join(doctor.QUICK)}; less than a minute")
    which.add_argument("--only", metavar="IDS", help="only these hazards, for example S4,E1")
    which.add_argument("--list", action="store_true", help="list the hazards, and run nothing")
    which.add_argument("--patches", action="store_true", help="only show which patch points match this torch")
    which.add_argument("--merge", nargs="+", metavar="JSON", help="print results of several torch versions as Markdown")
    one.add_argument("--json", metavar="FILE", help="write the result as JSON; - prints it instead of the table")
    one.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    one.add_argument("--jobs", type=_at_least_one, default=2, metavar="N", help="processes at the same time (2)")
    one.add_argument("--limit", type=float, default=doctor.LIMIT, metavar="SECONDS", help="what counts as a hang (120)")
    options = parser.parse_args(arguments)

    plain = options.markdown or options.merge or options.list or options.json == "-"
    if not plain and importlib.util.find_spec("rich") is None:
        one.error('the table needs rich: pip install "safecompile[doctor]" (--markdown and --json - do without)')
    if options.merge:
        return _merge(one, options.merge)
    if options.list:
        return _list()
    if options.patches:
        return _patches(options)
    ids = doctor.QUICK if options.quick else None
    if options.only:
        ids = tuple(id_.strip().upper() for id_ in options.only.split(","))
        if unknown := [id_ for id_ in ids if id_ not in doctor.all_programs()]:
            one.error(f"no hazard {', '.join(unknown)}: --list shows them")
    return _examine(options, ids)


def _at_least_one(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def _examine(options: argparse.Namespace, ids: Sequence[str] | None) -> int:
    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    report = doctor.examine(ids, jobs=options.jobs, limit=options.limit, progress=progress)
    for row in report.rows:
        if row.with_safecompile.bad and row.with_safecompile.output:
            print(f"\n{row.id} with safecompile:\n{row.with_safecompile.output}", file=sys.stderr)
    if options.json == "-":
        print(report.to_json())
        return int(report.failed)
    if options.json:
        Path(options.json).write_text(report.to_json())
    print(report.versions)
    _show(_table.report_lines(report), "Hazards", options)
    # Who asked for some hazards sees of the points what is wrong.
    if points := [point for point in report.patches if ids is None or point.state == "mismatch"]:
        _show(_table.patch_lines(points), "Patch points", options)
    print(_table.verdict(report))
    return int(report.failed)


def _patches(options: argparse.Namespace) -> int:
    points = doctor.examine_patches(limit=options.limit)
    if options.json:
        text = doctor.Report(doctor.versions(), [], points).to_json()
        if options.json == "-":
            print(text)
        else:
            Path(options.json).write_text(text)
    if options.json != "-":
        print(doctor.versions())
        _show(_table.patch_lines(points), "Patch points", options)
    return int(any(point.state == "mismatch" for point in points))


def _show(table: _table.Lines, title: str, options: argparse.Namespace) -> None:
    if options.markdown:
        print(f"\n{_table.markdown(table)}\n")
    else:
        _table.print_table(table, title)


def _merge(parser: argparse.ArgumentParser, files: Sequence[str]) -> int:
    def read(file: str) -> doctor.Report:
        try:
            return doctor.Report.from_json(Path(file).read_text())
        except (OSError, ValueError, KeyError, TypeError) as error:
            parser.error(f"{file}: {error}")

    print(_table.markdown(doctor.merged(map(read, files))))
    return 0


def _list() -> int:
    for program in doctor.all_programs().values():
        notes = [program.kind, *([] if program.protected else ["not protected yet"])]
        notes += [f"needs {program.needs}"] if program.needs else []
        notes += [f"torch {program.versions}"] if program.versions else []
        notes += [program.upstream] if program.upstream else []
        print(f"{program.id:4} {program.title} ({'; '.join(notes)})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
