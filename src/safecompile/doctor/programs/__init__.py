"""One program for each hazard; a module's name begins with the hazard's id."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from safecompile.doctor._program import Program
from safecompile.doctor._report import place

__all__ = ["all_programs"]


@cache
def all_programs() -> dict[str, Program]:
    """Return the programs by id, in the order of the table."""
    modules = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    programs = {module.run.id: module.run for module in modules}
    return {id_: programs[id_] for id_ in sorted(programs, key=place)}
