"""Rules that the source keeps: where torch's private names stand, what the core imports, how large it all is."""

from __future__ import annotations

import ast
import re
import sys
from typing import TYPE_CHECKING

import pytest

from tests.helpers.subprocess_run import ROOT

if TYPE_CHECKING:
    from pathlib import Path

PACKAGE = ROOT / "src" / "safecompile"
CORE = PACKAGE / "_core"
PATCHES = PACKAGE / "_patches"
MAX_LINES = 5000
TOOLS = {"__main__.py"}  # stand outside, as testing and doctor do
# What the doctor's programs show, users meet under these names, and there are no others.
SHOW_PRIVATE_NAMES = {
    "src/safecompile/doctor/programs/e10_compiled_autograd.py",
    "src/safecompile/doctor/programs/s10_configuration_elsewhere.py",
}

PRIVATE_TORCH = re.compile(
    r"""\btorch(?:\.\w+)*\._(?!_)\w+                                  # torch._C, torch.fx._symbolic_trace
      | \bfrom\ torch[\w.]*\ import\ .*\b_(?!_)\w+                   # from torch.fx import _symbolic_trace
      | \b_(?:dynamo|functorch|inductor|symbolic_trace|guards)\b     # the same behind another name or in a string
    """,
    re.VERBOSE,
)


def code_lines(source: str) -> list[str]:
    """Return a module's statements one a line, without comments and docstrings, which may name anything."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            node.body[0] = ast.Pass()
    return ast.unparse(tree).splitlines()


def private_torch_names(source: str) -> list[str]:
    return [line.strip() for line in code_lines(source) if PRIVATE_TORCH.search(line)]


def foreign_imports(source: str) -> list[str]:
    """Return what a module of the core imports from neither the standard library nor the core."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level != 1:
            names.append("." * node.level + (node.module or ""))
    return [
        name
        for name in names
        if name.split(".")[0] not in sys.stdlib_module_names and not f"{name}.".startswith("safecompile._core.")
    ]


def modules(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def test_private_torch_names_stand_in_the_patch_layer_only() -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for path in modules(PACKAGE)
        if PATCHES not in path.parents and (lines := private_torch_names(path.read_text()))
    }
    assert found.keys() == SHOW_PRIVATE_NAMES, found


def test_the_core_imports_no_torch() -> None:
    assert modules(CORE)
    found = {path.name: names for path in modules(CORE) if (names := foreign_imports(path.read_text()))}
    assert found == {}


def length(source: str) -> int:
    """Count the lines of code: docstrings are the reference, and comments the reasons, which must not be saved on."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in docstrings
        for number, line in enumerate(source.splitlines(), 1)
    )


def test_the_library_stays_small() -> None:
    lines = {
        str(path.relative_to(PACKAGE)): length(path.read_text())
        for path in modules(PACKAGE)
        if (path.parent == PACKAGE and path.name not in TOOLS) or CORE in path.parents or PATCHES in path.parents
    }
    assert sum(lines.values()) < MAX_LINES, lines


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch import _dynamo",
        "from torch.fx import Graph, _symbolic_trace",
        "from torch._functorch.aot_autograd import aot_module_simplified",
        "lock = torch._C.something",
        "torch.fx._symbolic_trace._is_fx_tracing_flag = True",
        "fx._symbolic_trace",
        "target = 'torch._dynamo.convert_frame'",
    ],
)
def test_the_rule_sees_private_names(line: str) -> None:
    assert private_torch_names(line)


@pytest.mark.parametrize(
    "line",
    [
        "torch.__version__",
        "torch.compiler.is_compiling()",
        "from torch.fx import Tracer",
        "x = 1  # torch._dynamo holds it",
        "def f():\n    '''Wait for torch._dynamo.'''",
    ],
)
def test_the_rule_allows_public_names_and_prose(line: str) -> None:
    assert not private_torch_names(line)


@pytest.mark.parametrize("line", ["import torch", "from torch import fx", "from .. import _patches", "import wrapt"])
def test_the_rule_sees_foreign_imports(line: str) -> None:
    assert foreign_imports(line)


@pytest.mark.parametrize("line", ["import threading", "from .lock import Lock", "from safecompile._core.lock import L"])
def test_the_rule_allows_the_core_and_the_standard_library(line: str) -> None:
    assert not foreign_imports(line)
