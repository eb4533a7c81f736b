"""``python -m safecompile doctor``: which hazards this torch has, without and with safecompile."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Literal

import torch

from safecompile.doctor import _runner
from safecompile.doctor._program import Program
from safecompile.doctor._report import PatchPoint, Report, Row, Run, Versions, merged
from safecompile.doctor.programs import all_programs

__all__ = [
    "LIMIT",
    "QUICK",
    "PatchPoint",
    "Program",
    "Report",
    "Row",
    "Run",
    "Versions",
    "all_programs",
    "examine",
    "examine_patches",
    "merged",
    "versions",
]

QUICK = ("S4", "S6", "D2", "E1", "E2", "E4")
"""What ``--quick`` runs: in less than a minute on two cores."""

LIMIT = 120.0
"""Seconds; a program that meets a hang knows so much sooner, and the longest compiles for a minute on a busy machine."""

_How = Literal["without", "with"]


def examine(
    ids: Iterable[str] | None = None,
    *,
    jobs: int = 2,
    limit: float = LIMIT,
    progress: Callable[[str], None] = lambda line: None,
) -> Report:
    """Run programs, each without and with safecompile in a process of its own, and look at the patch points.

    Args:
        ids: which hazards; all by default.
        jobs: how many processes run at the same time.
        limit: seconds after which a program counts as a hang.
        progress: is told in one line how each program ended.

    Raises:
        KeyError: there is no such hazard.
    """
    known = all_programs()
    wanted = [known[id_] for id_ in ids] if ids is not None else list(known.values())
    found: dict[tuple[str, _How], Run] = {}
    hows: tuple[_How, ...] = ("without", "with")
    with ThreadPoolExecutor(jobs) as pool:
        patches = pool.submit(examine_patches, limit=limit)
        futures = {
            pool.submit(_runner.run_program, program.run.__module__, how, limit=limit): (program, how)
            for program in wanted
            for how in hows
        }
        for future in as_completed(futures):
            program, how = futures[future]
            run = found[program.id, how] = future.result()
            progress(f"{program.id} {how} safecompile: {run.outcome}{run.detail and ', ' + run.detail}")
        rows = [_row(program, found[program.id, "without"], found[program.id, "with"]) for program in wanted]
        return Report(versions(), rows, patches.result())


def _row(program: Program, without: Run, with_safecompile: Run) -> Row:
    return Row(
        program.id,
        program.title,
        program.kind,
        program.upstream,
        program.protected,
        without=without,
        with_safecompile=with_safecompile,
    )


def examine_patches(*, limit: float = LIMIT) -> list[PatchPoint]:
    """Tell of each patch point whether it matches this torch, in a process of its own.

    Raises:
        RuntimeError: the process ended without an answer.
    """
    code, output, found = _runner.run_child("patches", "with", limit=limit)
    if found is None:
        raise RuntimeError(f"the look at the patch points ended with {'a hang' if code is None else code}:\n{output}")
    return [PatchPoint(**point) for point in found]


def versions() -> Versions:
    """Return the versions that a report is about."""
    try:
        own = importlib.metadata.version("safecompile")
    except importlib.metadata.PackageNotFoundError:
        own = "not installed, but imported from its source"
    return Versions(torch.__version__, platform.python_version(), platform.platform(), own)
