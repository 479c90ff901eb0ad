"""Where the C++ kernels are kept: no two sources or environments build into one folder in turn."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from fractrain_fx.native import build


def test_each_source_and_environment_has_a_build_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names: list[str] = []
    monkeypatch.setattr(cpp_extension, "load", lambda name, *_, **__: names.append(name))
    load = build.kernels.__wrapped__
    load()
    load()
    monkeypatch.setattr(sys, "prefix", "/another/environment")
    load()
    copy = tmp_path / "csrc"
    copy.mkdir()
    for file in build._SOURCES.iterdir():
        (copy / file.name).write_text(file.read_text())
    monkeypatch.setattr(build, "_SOURCES", copy)
    load()
    assert names[0] == names[1] and len(set(names)) == 3
