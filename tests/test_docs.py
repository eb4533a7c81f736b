"""The pages of the docs: each program on them runs, each place in torch that they name is there, the README is short."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.helpers.subprocess_run import ROOT, run_forked

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
TUTORIAL = ROOT / "examples" / "tutorial"
NOTE = re.compile(r"<!-- (tested|not run): (.+) -->")
# What the blocks of a page rely on that stands around them in a reader's program.
AROUND = {
    "observe.md": "import safecompile\nserve_the_first_requests = lambda: None\n",
    "tutorial.md": "from safecompile import thread_safe_compile\ndouble = lambda x: x * 2\n",
}


@dataclass(frozen=True)
class Block:
    """A Python block of a page, and the note above it, if any."""

    page: str
    number: int
    text: str
    note: str

    @property
    def snippet(self) -> str | None:
        """The file that the block shows, if it shows one."""
        found = re.fullmatch(r'--8<-- "(.+)"\n', self.text)
        return found[1] if found else None


def blocks(path: Path) -> list[Block]:
    found = re.finditer(
        r"(?:^(<!-- .* -->)\n)?^```python[^\n]*\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE
    )
    return [Block(path.name, number, one[2], one[1] or "") for number, one in enumerate(found)]


ALL = [block for page in PAGES for block in blocks(page)]
README = next(block for block in ALL if block.page == "README.md")
PROGRAMS = [block for block in ALL if block.snippet is None and not NOTE.match(block.note) and block is not README]


def test_the_blocks_are_found() -> None:
    assert len(ALL) == sum(page.read_text().count("```python") for page in PAGES)
    assert {"README.md", "testing.md", "tutorial.md", "warmup.md"} <= {block.page for block in ALL}


@pytest.mark.parametrize("block", PROGRAMS, ids=lambda block: f"{block.page}-{block.number}")
def test_a_program_on_a_page_runs(block: Block, tmp_path: Path) -> None:
    around = f"import os\nos.chdir({str(tmp_path)!r})\n{AROUND.get(block.page, '')}"  # one writes a file
    run_forked(around + block.text, timeout=120).check()


def test_the_notes_name_tests_that_are_there() -> None:
    """`tested: warmup` is test_warmup_in_executors.py's, and `tested: prometheus` test_observe.py's."""
    assert {note[2] for block in ALL if (note := NOTE.match(block.note)) and note[1] == "tested"} == {
        "prometheus",
        "warmup",
    }


def test_a_program_that_fails_is_seen() -> None:
    with pytest.raises(AssertionError, match="ended with 1"):
        run_forked(AROUND["observe.md"] + "serve_the_second_requests()").check()


@pytest.mark.inductor
def test_the_readme_says_what_its_program_prints() -> None:
    assert sum(block.page == "README.md" for block in ALL) == 1
    assert run_forked(README.text, timeout=120).check().stdout == "100 results, 1 graph compiled\n"
    assert sum(bool(line.strip()) for line in README.text.splitlines()) <= 8


def test_what_a_page_shows_is_a_file_that_a_test_runs() -> None:
    shown = {block.snippet for block in ALL if block.snippet is not None}
    tested = {
        str(path.relative_to(ROOT))
        for folder in ("recipes", "tutorial")
        for path in (ROOT / "examples" / folder).glob("*.py")
    }
    assert shown <= tested
    assert tested - shown == {"examples/tutorial/no_error.py"}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/dflash/README.md"])
def test_links_to_files_lead_somewhere(page: str) -> None:
    """Those of the site are checked when it is built."""
    path = ROOT / page
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []
    assert links or page != "README.md"


@pytest.mark.parametrize("name", ["safecompile", "safecompile.observe", "safecompile.testing"])
def test_every_public_name_is_in_the_reference(name: str) -> None:
    page = (ROOT / "docs" / "reference.md").read_text()
    public = importlib.import_module(name).__all__
    assert [one for one in public if f"{name}.{one}" not in page] == []


# ------------------------------------------------------------------------------------------------------------- tutorial


def shown_output(command: str) -> str:
    """Return what the tutorial shows below a command."""
    page = (ROOT / "docs" / "tutorial.md").read_text()
    found = re.search(rf"^\$ {re.escape(command)}\n(.*?)^(?:\$|```)", page, re.DOTALL | re.MULTILINE)
    assert found is not None, f"the tutorial does not show {command}"
    return found[1]


def printed(name: str, *options: str) -> str:
    return run_forked((TUTORIAL / name).read_text(), options, timeout=120).check().stdout


@pytest.mark.skipif(torch.__version__ >= "2.14", reason="the flag is a thread's from torch 2.14 on")
def test_the_error_is_the_one_that_the_tutorial_begins_with() -> None:
    assert printed("the_error.py") == shown_output("python examples/tutorial/the_error.py")


def test_one_line_makes_the_difference() -> None:
    assert printed("no_error.py") == shown_output("python examples/tutorial/no_error.py")
    old, new = ((TUTORIAL / name).read_text().splitlines() for name in ("the_error.py", "no_error.py"))
    assert [line for line in new[1:] if line not in old] == [
        "from safecompile import thread_safe_compile",
        'compiled = thread_safe_compile(double, backend="eager")',
    ]


def test_the_herd_of_the_tutorial_compiles_once() -> None:
    wanted = shown_output("python examples/tutorial/the_herd.py").splitlines()[1]
    assert printed("the_herd.py").splitlines()[1] == wanted == "compiles by thread_safe_compile: 1"


def test_the_gradients_of_the_tutorial_are_right() -> None:
    assert (
        printed("training.py")
        == shown_output("python examples/tutorial/training.py")
        == "100 of 100 gradients are right\n"
    )


def test_the_tutorial_trains_with_torch_alone_for_comparison() -> None:
    assert re.fullmatch(r"\d+ of 100 gradients are right\n", printed("training.py", "--stock"))


def test_the_server_of_the_tutorial_answers() -> None:
    assert printed("server.py") == shown_output("python examples/tutorial/server.py")


# ----------------------------------------------------------------------------------------------- places in torch's source

PLACES = re.compile(r"`(torch/[\w/]+\.py)`:\s+((?:`[\w.]+`(?:,\s+)?)+)")


def places() -> list[tuple[str, str]]:
    page = (ROOT / "docs" / "torch-developers.md").read_text()
    return [(file, name) for file, names in PLACES.findall(page) for name in re.findall(r"`([\w.]+)`", names)]


def missing(file: str, name: str) -> list[str]:
    """Return the parts of a dotted name that a file of the installed torch neither defines nor imports."""
    source = (Path(torch.__file__).parents[1] / file).read_text()
    defined = r"^\s*(?:def|class) {0}\b|^\s*{0}\b\s*(?::[^=\n]+)?=|^\s*{0},$"
    return [part for part in name.split(".") if not re.search(defined.format(part), source, re.MULTILINE)]


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the page has the places of torch 2.13.0")
@pytest.mark.parametrize(("file", "name"), places())
def test_a_place_in_torch_is_there(file: str, name: str) -> None:
    assert missing(file, name) == []


def test_a_place_that_is_not_there_is_seen() -> None:
    assert len(places()) > 40
    assert missing("torch/fx/_symbolic_trace.py", "Tracer.no_such_method") == ["no_such_method"]
