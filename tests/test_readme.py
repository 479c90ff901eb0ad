"""The documentation is true: its Python and its notebooks run, its commands exist, its links lead somewhere."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from fractrain_fx import cli
from fractrain_fx.cli.parser import make_parser

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "docs").glob("tutorials/*.ipynb"))
PAGES = [ROOT / "README.md", *sorted(each for each in (ROOT / "docs").glob("**/*.md") if "results" not in each.parts)]
DECISIONS = [page for page in PAGES if page.parent.name == "decisions" and page.name != "index.md"]
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_DECISION = re.compile(r"- \*\*.+\?\*\*\n  .+\n  .*(?:`.+`|\]\(.+\)|[Cc]ommits? [0-9a-f]{7}.*), \d{4}-\d\d-\d\d\.")


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for fence in _FENCE.finditer(text):
            line = text.count("\n", 0, fence.start()) + 1
            found.append(Block(page, line, fence[1], fence[2]))
    return [block for block in found if block.language in languages]


def commands(program: str) -> list[list[str]]:
    """Every call of a program in the shell blocks, in words, without comments and prompts."""
    lines = (line for block in blocks("bash", "sh", "console") for line in block.text.replace("\\\n", " ").splitlines())
    words = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]
    return [call[1:] for call in words if call[:1] == [program]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run_in_the_order_of_the_page(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("docs").symlink_to(ROOT / "docs")  # a page may read data that lies in the repository
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks("python"):
        if block.page == page:
            # blank lines in front, so that an error's traceback shows the line of the page
            exec(compile("\n" * block.line + block.text, str(page), "exec"), names)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.name)
def test_the_cells_of_a_notebook_run_in_order_and_print_what_stands_there(
    notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    capsys.readouterr()
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        exec(compile("".join(cell["source"]), f"{notebook} [{cell['execution_count']}]", "exec"), names)
        written = "".join(line for output in cell["outputs"] for line in output["text"])
        # Other machines and versions sum in another order, so that numbers of a training differ.
        assert _words(capsys.readouterr().out) == _words(written)


def _words(text: str) -> str:
    return re.sub(r"FW-\d+/BW-\d+|[\d.]+", "#", text)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.name)
def test_links_of_a_notebook_lead_somewhere(notebook: Path) -> None:
    links = _LINK.findall(notebook.read_text(encoding="utf-8"))
    assert links and [link for link in links if "://" not in link and not (notebook.parent / link).exists()] == []


@pytest.mark.parametrize("call", commands("fractrain"), ids=" ".join)
def test_fractrain_commands_are_understood_and_the_short_ones_run(
    call: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if call[0] in ("train", "report", "export", "sensitivity"):  # hours long; of runs that this page's reader has
        make_parser().parse_args(call)
    else:
        assert cli.main(call) == 0


@pytest.mark.parametrize("call", commands("make"), ids=" ".join)
def test_make_commands_name_targets_that_exist(call: list[str]) -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {word for word in call if "=" not in word} <= set(targets)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    links = [link for link in _LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.name)
def test_a_decision_has_a_question_an_answer_and_a_dated_source_that_exists(page: Path) -> None:
    paragraphs = page.read_text(encoding="utf-8").strip().split("\n\n")
    entries = [paragraph for paragraph in paragraphs if not paragraph.startswith("#")]
    assert [entry for entry in entries if not _DECISION.fullmatch(entry)] == []
    sources = re.findall(r"`(tests/[^`]+)`", "\n".join(entries))
    assert [source for source in sources if not (ROOT / source).exists()] == []
