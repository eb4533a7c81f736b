"""Build the source archive and of it the wheel, install them into empty environments, and try them there: `make package`.

The environments find torch in the interpreter that runs this, as pip does when it looks for what they need; one has the
oldest wrapt that the package says it can do with. Everything is in a temporary folder but `dist`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
# What else is in the archive: of this the tests, the demo and the docs are made.
IN_ARCHIVE = {"tests/smoke.py", "examples/tutorial/server.py", "docs/tutorial.md", "Makefile", "README.md", "LICENSE"}
# What is in no archive: 3.5 MB that draw diagrams on the site.
NOT_IN_ARCHIVE = "docs/assets/mermaid.min.js"


def call(*command: str | Path, cwd: Path = ROOT, path: Path | None = None) -> None:
    """Run a command, which finds programs in the folder ``path`` first."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PATH"] = f"{path}{os.pathsep}{environment['PATH']}"
    subprocess.run(command, cwd=cwd, env=environment, check=True)


def build() -> tuple[Path, Path]:
    """Return the wheel and the archive."""
    shutil.rmtree(DIST, ignore_errors=True)
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST)
    (wheel,), (archive,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    if missing := IN_ARCHIVE - names:
        raise SystemExit(f"{archive.name} lacks {', '.join(sorted(missing))}")
    if NOT_IN_ARCHIVE in names:
        raise SystemExit(f"{archive.name} has {NOT_IN_ARCHIVE}")
    return wheel, archive


def oldest_wrapt() -> str:
    found = re.search(r'"wrapt>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert found is not None
    return f"{found[1]}.0" if found[1].count(".") == 1 else found[1]


def try_in_an_empty_environment(package: Path, *, wrapt: str | None = None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        call(sys.executable, "-m", "venv", "--without-pip", folder)
        python = Path(folder, "bin", "python")
        site = subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        # Behind the environment's own packages, and without the .pth files there: an editable install is not seen.
        Path(site, "installed.pth").write_text(
            "\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n"
        )
        pip = (python, "-m", "pip", "install", "--quiet", "--no-build-isolation")
        if wrapt is not None:
            call(*pip, "--ignore-installed", f"wrapt=={wrapt}", cwd=Path(folder))
        call(*pip, "--ignore-installed", "--no-deps", package, cwd=Path(folder))
        options = ["--doctor"] if wrapt is None else ["--wrapt", wrapt]
        call(python, ROOT / "tests" / "smoke.py", *options, cwd=Path(folder))
        # Are the types complete for those who have the package alone? It looks at the first python that it finds.
        pyright = (sys.executable, "-m", "pyright", "--ignoreexternal", "--verifytypes", "safecompile")
        call(*pyright, cwd=Path(folder), path=python.parent)
        print(f"{package.name} works in an empty environment{f' with wrapt {wrapt}' if wrapt else ''}")  # noqa: T201


def main() -> None:
    wheel, archive = build()
    try_in_an_empty_environment(wheel)
    try_in_an_empty_environment(archive, wrapt=oldest_wrapt())


if __name__ == "__main__":
    main()
