"""The benchmark on modules of public projects: what a file may need, what becomes of its modules, and the page."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.coverage.corpus import __main__ as sweep
from benchmarks.coverage.corpus.modules import CorpusError, cases_of, is_stand_in, projects
from benchmarks.coverage.corpus.outputs import differs, objective
from benchmarks.coverage.corpus.page import read_rows, section, summary
from benchmarks.coverage.corpus.processes import examined, limited
from benchmarks.coverage.corpus.trial import LateError, Row, examine
from benchmarks.coverage.pool import Limits

HEAD = """
import os, random, sys
from _paritybench_helpers import _mock_config, _mock_layer, _paritybench_base, _fails_compile, patch_functional
import a_package_that_nobody_has
from a_package_that_nobody_has.part import anything
import torch
from torch import nn
patch_functional()
_config = _mock_config(width=3)
class Odd:
    pass
"""
MODULES = {
    "Good": "return self.linear(x)",
    "Odd": "found = Odd(); found.x = self.linear(x); return found",
    "Random": "return self.linear(x) * Random.count()",
    "Text": "return 'no tensor'",
    "Lacks": "return x, anything.of(x)",
    "Fails": "raise ValueError('no')",
    "Ends": "os._exit(3) if self.training and self.calls() > 4 else None; return self.linear(x)",
    "Last": "return {'a': self.linear(x), 'n': x.shape[0]}",
}
UNUSABLE = ("Random", "Text", "Lacks", "Fails")
CLASS = """
class {name}(nn.Module):
    n = [0]
    def __init__(self, width=_config.width):
        super().__init__()
        self.linear = _mock_layer(width, 2)
    def calls(self):
        self.n[0] += 1
        return self.n[0]
    @staticmethod
    def count():
        return int.from_bytes(os.urandom(2), 'big')
    def forward(self, x):
        {body}
"""


def write(folder: Path, name: str, *modules: str) -> Path:
    code = HEAD + "".join(CLASS.format(name=each, body=MODULES[each]) for each in modules)
    call = "lambda: ([], {}), lambda: ([torch.rand(4, 3) - 0.6], {}), True"
    listed = ",".join(f"({each}, {call})" for each in modules)
    path = folder / f"test_{name}.py"
    path.write_text(f"{code}\nTESTCASES = [{listed}]\n")
    return path


def row_of(path: Path) -> Row:
    (case,) = cases_of(path)
    return examine(case, contextlib.nullcontext)


def test_a_file_gets_stand_ins_for_packages_that_are_missing_and_nobody_else_does(tmp_path: Path) -> None:
    (case,) = cases_of(write(tmp_path, "lacks", "Lacks"))
    assert case.name == "Lacks" and is_stand_in(case.build()(torch.rand(2, 3))[1])
    with pytest.raises(ImportError):
        import another_package_that_nobody_has  # type: ignore[import-not-found]  # noqa: F401


def test_a_file_without_modules_is_an_error_of_its_own(tmp_path: Path) -> None:
    for code in ("x = 1", "TESTCASES = []", "import sys; sys.exit()"):
        path = tmp_path / "test_none.py"
        path.write_text(code)
        with pytest.raises(CorpusError):
            cases_of(path)
    assert list(projects(tmp_path)) == ["none"]


@pytest.mark.parametrize(
    ("name", "verdict"),
    [("Good", "passed"), ("Last", "passed"), ("Odd", "refused"), *((each, "unusable") for each in UNUSABLE)],
)
def test_each_module_gets_its_verdict(tmp_path: Path, name: str, verdict: str) -> None:
    row = row_of(write(tmp_path, name, name))
    assert row["verdict"] == verdict, row
    assert ("verdict_cause" in row) == (verdict != "passed")
    if verdict == "passed":
        assert (row["pfq"], row["export"], row["fullgraph"]) == ("passed", "passed", "passed")
    elif verdict == "refused":
        assert row["export"] == "refused" and "Odd" in row["verdict_cause"]
    else:
        assert "export" not in row


def test_a_rewrite_that_computes_something_else_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.coverage.corpus import trial

    def wrong(model: nn.Module, **_: Any) -> nn.Module:
        model.get_parameter("inner.linear.weight").data[0, 0] += 1
        return model

    monkeypatch.setattr(trial, "fractrainify", wrong)
    row = row_of(write(tmp_path, "wrong", "Good"))
    assert (row["verdict"], row["pfq"]) == ("silently different", "not reached")


def test_a_process_that_dies_costs_one_module(tmp_path: Path) -> None:
    rows = list(examined(write(tmp_path, "mixed", "Ends", "Last"), Limits(seconds=60.0, gib=8.0)))
    assert {row["name"]: row["verdict"] for row in rows} == {"Ends": "process died", "Last": "passed"}


def test_a_check_ends_after_its_time_even_if_the_code_catches_errors() -> None:
    with pytest.raises(LateError), limited(0.2):
        while True:
            with contextlib.suppress(Exception):
                sum(range(1000))


def test_outputs_are_compared_by_value_place_and_type() -> None:
    x = torch.tensor([1.0, torch.nan])
    assert differs({"a": x, "n": [1, None]}, {"a": x.clone(), "n": [1, None]}) is None
    assert differs({"a": x}, {"b": x}) == "1 values instead of 1"
    assert differs([x, 1], [x, 1.0]) == "output[1]"
    assert differs(x, x + 1) == "output"
    assert differs((x,), [x]) == "a list instead of a tuple"
    assert objective([x, 3]) is None
    assert objective(torch.ones(3, requires_grad=True)) == torch.arange(3).cos().sum()


def test_a_run_goes_on_where_it_stopped_and_writes_its_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "one", "Good")
    write(tmp_path, "two", "Odd")
    page, out = tmp_path / "page.md", tmp_path / "corpus.jsonl"
    page.write_text("# Page\n\n<!-- corpus -->\n<!-- /corpus -->\n")
    sweep.main([str(tmp_path), "--out", str(out), "--projects", "1"])
    first = read_rows(out)
    assert len(first) == 1
    monkeypatch.setattr(sweep, "examined", lambda path, *_: pytest.fail() if path.stem == first[0]["project"] else [])
    sweep.main([str(tmp_path), "--out", str(out), "--page", str(page)])
    assert read_rows(out) == first
    assert section(first) in page.read_text()
    assert summary(first) in capsys.readouterr().out


def test_the_page_counts_modules_and_projects() -> None:
    good = {"verdict": "passed", "pfq": "passed", "export": "refused", "fullgraph": "passed", "commit": "c"}
    bad = good | {"verdict": "refused", "verdict_cause": "why", "pfq": "not reached"}
    rows = [
        {"project": "a", "index": 0, "name": "A"} | good,
        {"project": "a", "index": 1, "name": "B"} | bad,
        {"project": "b", "index": 0, "name": "C"} | good,
        {"project": "b", "index": 1, "name": "D", "verdict": "unusable", "verdict_cause": "no", "commit": "c"},
        {"project": "c", "index": -1, "verdict": "no modules", "verdict_cause": "no", "commit": "c"},
    ]
    text = section(rows)
    assert "| `fractrainify`, float | 2 of 3 (66.7 %) | 1 of 2 (50.0 %) | 1 | 0 | 0 | 0 | 0 |" in text
    assert "| `torch.export` | 0 of 3 (0.0 %) | 0 of 2 (0.0 %) | 3 | 0 | 0 | 0 | 0 |" in text
    assert "2 of 2 (100.0 %) of the modules with weights" in text
    assert "| a/B | refused | why |" in text
