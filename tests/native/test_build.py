"""Where the C++ kernels are kept: no two sources or environments build into one folder in turn, and none twice."""

from __future__ import annotations

import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

from fractrain_fx.config import FracConfig
from fractrain_fx.errors import ConfigError
from fractrain_fx.native import build
from fractrain_fx.native.choice import MEANING, choose_rounding


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The names of the libraries that a compiler which only writes an empty file has built, in an empty folder."""
    built: list[str] = []

    def compiled(name: str, *_: Any, build_directory: str, **__: Any) -> None:
        assert not build.is_built()
        Path(build_directory, f"{name}.so").touch()
        built.append(name)

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "builds"))
    monkeypatch.setattr(cpp_extension, "load", compiled)
    monkeypatch.setattr(build, "lacking_programs", lambda: [])
    monkeypatch.setattr(torch.ops, "load_library", lambda _: None)
    return built


def test_each_source_and_environment_has_a_build_and_builds_it_once(
    builds: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    load = build.kernels.__wrapped__
    assert not build.is_built()
    load()
    assert build.is_built()
    load()
    assert builds == [build.library().stem]
    monkeypatch.setattr(sys, "prefix", "/another/environment")
    load()
    copy = tmp_path / "csrc"
    copy.mkdir()
    for file in build.SOURCES.iterdir():
        (copy / file.name).write_text(file.read_text())
    monkeypatch.setattr(build, "SOURCES", copy)
    load()
    assert len(set(builds)) == len(builds) == 3


def test_a_build_that_was_killed_is_built_again(builds: list[str]) -> None:
    folder = build.library().parent
    folder.mkdir(parents=True)
    build.library().touch()  # a part of it
    (folder / "lock").touch()  # torch's, on which every later build would wait without end
    assert not build.is_built()
    build.kernels.__wrapped__()
    assert len(builds) == 1 and build.is_built() and not (folder / "lock").exists()


def test_a_build_that_failed_counts_as_none(builds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise RuntimeError("Error building extension")

    monkeypatch.setattr(cpp_extension, "load", failing)
    with pytest.raises(ConfigError, match=r"needs a C.. compiler.*Error building extension"):
        build.kernels.__wrapped__()
    assert not build.is_built()


@pytest.mark.parametrize("has", [False, True])
@pytest.mark.parametrize("lent", [False, True])
def test_units_for_matrices_are_used_where_the_system_lends_them(
    builds: list[str], monkeypatch: pytest.MonkeyPatch, has: bool, lent: bool
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    without = build.library()
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: lent)
    assert ("-mamx-int8" in build._flags()) == (has and lent)
    assert (build.library() == without) != (has and lent)


def test_programs_are_looked_for_on_the_path_and_beside_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ninja lies beside Python after a `pip install`, whether the environment is active or not."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "builds"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("CXX", "ccache clang++")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    assert build.lacking_programs() == ["ccache", "ninja"]
    with pytest.raises(ConfigError, match=r"needs a C.. compiler .* there is no ccache and no ninja here"):
        build.kernels.__wrapped__()
    for program in (tmp_path / "bin" / "ninja", tmp_path / "path" / "ccache"):
        program.parent.mkdir()
        program.touch(mode=0o755)
    assert build.lacking_programs() == []
    searched: list[str | None] = []
    monkeypatch.setattr(cpp_extension, "load", lambda *_, **__: searched.append(shutil.which("ninja")))
    monkeypatch.setattr(torch.ops, "load_library", lambda _: None)
    build.kernels.__wrapped__()
    assert searched == [str(tmp_path / "bin" / "ninja")] and shutil.which("ninja") is None


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="there are no owners and modes")
@pytest.mark.parametrize("place", ["folder", "library"])
def test_a_build_that_others_may_write_to_is_not_loaded(
    place: str, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = build.kernels.__wrapped__
    before = os.umask(0o002)  # of many systems: groups may write to new files
    try:
        load()
    finally:
        os.umask(before)
    assert build.distrusted() is None
    monkeypatch.delenv(MEANING, raising=False)
    choose = partial(choose_rounding, FracConfig(method="static"), torch.device("cpu"))
    assert choose().used == "cpu"

    opened = build.library().parent if place == "folder" else build.library()
    opened.chmod(0o775)
    with pytest.raises(ConfigError, match=rf"others may write to {opened}, so its code is not loaded: remove"):
        load()
    choice = choose()
    assert choice.used != "cpu" and f"others may write to {opened}" in str(choice)
    opened.chmod(0o755)
    load()
    assert builds == [build.library().stem]


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="there are no owners and modes")
def test_a_folder_of_another_user_is_neither_built_in_nor_loaded(
    builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build.library().parent.mkdir(parents=True)
    if (user := os.getuid()) == 0:
        os.chown(build.library().parent, 1, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.raises(ConfigError, match="belongs to another user, so its code is not loaded: set TORCH_EXT"):
        build.kernels.__wrapped__()
    assert builds == []
