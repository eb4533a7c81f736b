"""The map of the paper in the README names what exists, and what it names says where it comes from; its commands can work."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="the example's display")
pytest.importorskip("matplotlib", reason="the example's plots")
pytest.importorskip("transformers", reason="the example's target is a transformers model")

from benchmarks import dflash_devices
from checkpoints import NOT_IN_CONTRACT
from command import command_line
from tests.dflash.conftest import EXAMPLE

SOURCE = re.compile(r"paper|equation|section|Figure|A\.\d")


def rows() -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Return piece, place in the paper, and the (file, name) pairs that stand beside them."""
    table = (EXAMPLE / "README.md").read_text().split("## Where the paper's pieces are")[1].split("\n## ")[0]
    found = []
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and "`" in line:
            named, file = [], ""
            for word in re.findall(r"`([^`]+)`", cells[2]):
                if word.endswith(".py"):
                    file = word
                else:
                    named.append((file, word))
            found.append((cells[0], cells[1], named))
    return found


def docstrings(file: str, name: str) -> str:
    """Return the docstrings of a function or class and of all it stands in."""
    node: ast.Module | ast.ClassDef | ast.FunctionDef = ast.parse((EXAMPLE / file).read_text())
    texts = [ast.get_docstring(node) or ""]
    for part in name.split("."):
        node = next(n for n in node.body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == part)
        texts.append(ast.get_docstring(node) or "")
    return "\n".join(texts)


def test_the_map_is_long() -> None:
    assert len(rows()) >= 15


@pytest.mark.parametrize(("piece", "place", "named"), rows())
def test_every_piece_is_found_where_the_map_says_and_names_its_source(
    piece: str, place: str, named: list[tuple[str, str]]
) -> None:
    assert named
    texts = [docstrings(file, name) for file, name in named]
    if place:
        assert any(SOURCE.search(text) for text in texts), piece


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("attention.py", "attend"),
        ("attention.py", "mask_rule"),
        ("blocks.py", "labels"),
        ("blocks.py", "positions"),
        ("blocks.py", "sample_anchors"),
        ("blocks.py", "dpace_weights"),
        ("blocks.py", "shares"),
        ("blocks.py", "slot_weights"),
        ("drafter.py", "Attention"),
        ("drafter.py", "Drafter.context"),
        ("drafter.py", "FeedForward"),
        ("drafter.py", "rotate"),
        ("drafter.py", "rotation"),
        ("evaluate.py", "acceptance_by_position"),
        ("evaluate.py", "tau"),
        ("loss.py", "chunk_loss"),
        ("loss.py", "chunked_loss"),
        ("optimizer.py", "schedule"),
        ("speculative.py", "acceptance_length"),
        ("target.py", "tapped_layers"),
    ],
)
def test_a_formula_names_its_equation_or_section(file: str, name: str) -> None:
    tree = ast.parse((EXAMPLE / file).read_text())
    own = docstrings(file, name).removeprefix(ast.get_docstring(tree) or "")
    assert re.search(r"equation|section|Figure|A\.\d", own, re.IGNORECASE)


def commands() -> list[str]:
    return re.findall(r"^python examples/dflash/demo\.py.*$", (EXAMPLE / "README.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("line", commands())
def test_the_options_of_a_command_go_together(line: str) -> None:
    arguments = shlex.split(line)[2:]
    if "mine.toml" not in arguments:  # the reader's own
        command_line(arguments)


def test_the_benchmark_of_a_gpu_for_each_thread_has_the_options_and_parts_that_are_named(tmp_path: Path) -> None:
    section = (EXAMPLE / "README.md").read_text().split("## A GPU for each thread")[1].split("\n## ")[0]
    lines = re.findall(r"^python benchmarks/dflash_devices\.py(.*)$", section, re.MULTILINE)
    tried = re.findall(r"`(--devices [^`]+)`", section)
    assert (len(lines), len(tried)) == (2, 2)
    kinds = set(re.findall(r"\(`(\w+)`\)", section))
    for line in (*lines, *tried):
        options = dflash_devices.parser_of_options().parse_args([*shlex.split(line), "--devices=cpu"])
        assert {part.kind for part in dflash_devices.parts_of(options, str(tmp_path))} == kinds
        assert f"`--limit` seconds ({options.limit:g})" in section
    assert f"{dflash_devices.FULL['target_layers']} layers" in section
    assert f"{dflash_devices.FULL['length']:,} tokens, {dflash_devices.FULL['anchors']} anchors" in section


def test_every_file_is_in_the_table() -> None:
    table = (EXAMPLE / "README.md").read_text().split("## Files")[1].split("\n\n")[1]
    files = re.findall(r"`(\w+\.py)`", "".join(row.split("|")[1] for row in table.splitlines()))
    assert sorted(files) == sorted(path.name for path in EXAMPLE.glob("*.py"))


def test_what_may_change_at_a_resume_is_named() -> None:
    said = (EXAMPLE / "README.md").read_text().split("**What may change:**")[1].split("\n- **")[0]
    places, evaluation = {"target", "text", "data", "cache"}, {n for n in NOT_IN_CONTRACT if n.startswith("eval_")}
    options = {name.replace("-", "_") for name in re.findall(r"`--([\w-]+)`", said)}
    assert options == NOT_IN_CONTRACT - places - evaluation


def test_every_kind_of_metric_is_in_the_table() -> None:
    sources = "\n".join(path.read_text() for path in EXAMPLE.glob("*.py"))
    written = set(re.findall(r"(?:\.metric|_write)\(\s*\"(\w+)\"|\"kind\": \"(\w+)\"", sources))
    kinds = {first or second for first, second in written}
    table = (EXAMPLE / "README.md").read_text().split("| kind |")[1].split("\n\n")[0]
    assert (
        set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == kinds >= {"step", "evaluation", "threads", "resume"}
    )
