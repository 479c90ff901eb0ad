"""The example scripts run, and FracTrain takes in a plain script the lines that docs/own-model.md shows."""

from __future__ import annotations

import difflib
import runpy
import shlex
from pathlib import Path

import pytest

from fractrain_fx import cli

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def changes() -> list[str]:
    """Lines that differ between the two scripts, below their docstrings; blank ones apart."""
    plain, fractrain = ((EXAMPLES / name).read_text().splitlines()[1:] for name in ("plain.py", "plain_fractrain.py"))
    marked = difflib.ndiff(plain, fractrain)
    return [line for line in marked if line[0] in "+-" and line[1:].strip()]


def test_a_plain_script_needs_one_line_changed_and_four_new_ones_and_the_page_shows_them() -> None:
    removed = [line[2:] for line in changes() if line[0] == "-"]
    added = [line[2:] for line in changes() if line[0] == "+"]
    assert (len(removed), len(added)) == (1, 5)
    page = (ROOT / "docs" / "own-model.md").read_text()
    for mark, lines in (("-", removed), ("+", added)):
        for line in lines:
            assert f"\n{mark}{line}\n" in page


@pytest.mark.parametrize("name", ["plain", "plain_fractrain"])
def test_both_scripts_learn(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("epoch 2: test accuracy") and float(last.split()[-1].rstrip("%")) > 20  # chance is 10


@pytest.mark.long
def test_the_demo_leaves_runs_that_its_last_line_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    demo = runpy.run_path(str(EXAMPLES / "demo.py"))
    demo["main"](epochs=1)
    demo["main"](epochs=1)  # replaces what the first one left
    program, *arguments = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert Path(program).name == "fractrain"
    assert cli.main(arguments) == 0
    assert (tmp_path / "runs" / "demo" / "report.html").is_file()
