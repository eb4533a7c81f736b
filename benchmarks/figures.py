"""Put the figures of a run into the README and the docs: ``python -m benchmarks.figures [FOLDER]``.

FOLDER is what ``python -m benchmarks.run --output FOLDER`` has written: its results become docs/benchmarks.json and its
plots docs/images. Without it, what stands there already is put in again. Only what stands between a pair of markers,
``<!-- figures: NAME -->`` and ``<!-- end of figures -->``, is changed.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import plots, report
from benchmarks.run import ROOT, SCHEMA

Result = dict[str, Any]

RESULTS, IMAGES = ROOT / "docs/benchmarks.json", ROOT / "docs/images"
PAGES = {ROOT / "README.md": "docs/images", ROOT / "docs/benchmarks.md": "images"}
"""By page that has markers, where it finds the plots."""

MARKED = re.compile(r"(<!-- figures: (\S+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
NOTHING = "*No run is kept yet: `make bench` measures.*"


def block(name: str, run: Result | None, images: str) -> str:
    """Return what stands between the markers of a name: a table, the machine, a plot, or a plot and its table."""
    if run is None:
        return NOTHING
    if name == "machine":
        return f"Measured by `make bench` on {report.machine(run)}."
    if name == "targets":
        return report.targets(run).markdown()
    kind, _, piece = name.rpartition("/")
    table = report.table(run, piece)
    picture = f"![{table.title.replace('`', '')}]({images}/{piece}.png)"
    shown = {"plot": [picture], "": [picture, table.markdown()] if piece in plots.PLOTS else [table.markdown()]}
    return "\n\n".join(shown[kind])


def inserted(page: str, run: Result | None, images: str) -> str:
    """Return the text of a page with the figures of a run."""
    return MARKED.sub(lambda match: f"{match[1]}{block(match[2], run, images)}\n{match[3]}", page)


def kept() -> Result | None:
    """Return the run that the README and the docs show."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else None


def checked(run: Result) -> Result:
    """Return a run whose figures can be shown."""
    if run.get("schema") != SCHEMA:
        raise SystemExit(f"These results have schema {run.get('schema')}, and not {SCHEMA}: measure again.")
    if missing := report.TABLES.keys() - run["results"].keys():
        raise SystemExit(f"These results lack {', '.join(sorted(missing))}: measure again without --only.")
    if run["quick"]:
        raise SystemExit("A quick run has no figures to quote: measure again without --quick.")
    return run


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="what benchmarks.run has written")
    options = parser.parse_args(arguments)
    if options.folder:
        results = (options.folder / "results.json").read_text()
        checked(json.loads(results))
        RESULTS.write_text(results)
    run = kept()
    if run is not None:
        IMAGES.mkdir(exist_ok=True)
        plots.draw_all(checked(run), IMAGES)
    for page, images in PAGES.items():
        page.write_text(inserted(page.read_text(), run, images))


if __name__ == "__main__":
    main()
