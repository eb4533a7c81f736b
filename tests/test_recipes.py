"""The recipes, each a program that checks its own results."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.helpers.subprocess_run import ROOT, run_forked
from tests.test_source_rules import length

RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.py"))
NEED = {
    "fastapi_endpoints": ("fastapi", "httpx"),
    "transformers_generate": ("transformers",),
}


@pytest.mark.parametrize("program", RECIPES, ids=lambda program: program.stem)
def test_a_recipe_runs_and_finds_its_results_right(program: Path) -> None:
    for package in NEED.get(program.stem, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the recipe needs {package}")
    if program.stem == "transformers_generate" and not hasattr(torch.compiler, "is_exporting"):  # torch 2.6
        pytest.skip("transformers' masks cannot be compiled: they call torch.compiler.is_exporting, from torch 2.7 on")
    if program.stem == "data_loader_workers" and torch.cuda.is_available():
        pytest.skip("where there is a GPU, Dynamo asks for its random numbers, which a forked process cannot")
    done = run_forked(program.read_text(), timeout=120).check()
    assert done.stdout.count("\n") == 1, "it says in a line what it has shown"


@pytest.mark.parametrize("program", RECIPES, ids=lambda program: program.stem)
def test_a_recipe_is_short_and_stands_on_its_page(program: Path) -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert f'--8<-- "examples/recipes/{program.name}"' in page
    assert length(program.read_text()) <= 42
