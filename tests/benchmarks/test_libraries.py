"""The suite of third-party libraries, on one that is written here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.coverage import libraries
from benchmarks.coverage.cases import Case, NotBuiltError
from benchmarks.coverage.libraries.entry import Entry, Module
from benchmarks.coverage.results import Results
from benchmarks.coverage.table import markdown
from benchmarks.coverage.trial import examine, passed

_NETS = """
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, x):
        x = self.stem(x)
        return self.head(x + self.body(x).relu())
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Module:
    (tmp_path / "written_here.py").write_text(_NETS)
    metadata = tmp_path / "written_here-1.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: written-here\nVersion: 1.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    return Module("written_here")


def test_a_model_of_a_library_is_put_through_every_check(nets: Module, tmp_path: Path) -> None:
    entry = Entry("written-here", "Net", lambda: nets.Net(8), lambda: (torch.randn(2, 4),))
    row = examine(lambda: libraries.ready(entry))
    assert passed(row), (row.get("failed_at"), row.get("cause"))
    results = Results(tmp_path / "all.json")
    results.add(Case("libraries", "written-here/Net", "written-here"), row)
    page = markdown(results)
    assert row["how"]["release"] == "1.2" and "Models of 1 libraries" in page
    assert "| libraries | batch sizes | 1 equal |" in page


def test_a_library_that_is_missing_or_broken_says_so(nets: Module) -> None:
    with pytest.raises(NotBuiltError, match="is not installed: run make coverage-libraries"):
        libraries.ready(Entry("never-installed", "Net", lambda: nets.Net(8), tuple))
    with pytest.raises(NotBuiltError, match=r"written-here 1\.2: AttributeError"):
        libraries.ready(Entry("written-here", "Other", lambda: nets.Other(), tuple))


def test_the_suite_is_large_and_its_libraries_are_in_the_requirements() -> None:
    names = [case.name for case in libraries.cases(sample=False)]
    assert len(set(names)) == len(names) >= 66
    wanted = {entry.library for entry in libraries.ENTRIES}
    assert len(wanted) >= 25
    text = Path(libraries.__file__).with_name("requirements.txt").read_text()
    listed = {_plain(found) for found in re.findall(r"^([\w.-]+)>=", text, re.MULTILINE)}
    assert {_plain(each) for each in wanted} <= listed
    groups = [case.group for case in libraries.cases(sample=True)]
    assert max(groups.count(group) for group in groups) == 2


@pytest.mark.long
def test_no_library_is_loaded_before_its_model_is_built() -> None:
    code = "import sys, benchmarks.coverage.libraries; print(sys.modules.keys() & {'diffusers', 'monai', 'tsai'})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
