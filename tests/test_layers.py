"""The order of rooms, read from the imports themselves: those inside functions and for types alone count as well."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from itertools import permutations
from pathlib import Path, PurePath

import pytest

PACKAGE = Path(__file__).parents[1] / "fractrain_fx"
FILES = {path.relative_to(PACKAGE): path for path in sorted(PACKAGE.rglob("*.py"))}
ROOMS = (
    *(
        "errors",
        "durable",
        "memory",
        "config",
        "native",
        "formats",
        "kernels",
        "capture",
        "nn",
        "execution",
        "passes",
        "engine",
    ),
    *(
        "rewriting",
        "export",
        "model",
        "distributed",
        "hardware",
        "numerics",
        "summary",
        "drawing",
        "integrations",
        "api",
    ),
    *("zoo/models", "zoo/recipes", "training"),
    *("report", "zoo", "cli", ""),
)
"""An import goes to the same room or to one further left; the last is the package's own front."""


def imports(path: Path) -> Iterator[tuple[int, PurePath]]:
    """The lines of a file that import from the package, and the modules or folders that they import."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} is a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for package, *rest in (name.split(".") for name in names):
            if package == PACKAGE.name:
                while rest and not (
                    PACKAGE.joinpath(*rest).is_dir() or PACKAGE.joinpath(*rest).with_suffix(".py").exists()
                ):
                    rest.pop()  # what a module defines
                yield node.lineno, PurePath(*rest)


def room(module: PurePath) -> str:
    """The room that a module lies in, or a folder is."""
    parts = module.with_suffix("").parts
    return next((each for each in ("/".join(parts[:2]), *parts[:1]) if each in ROOMS), "")


EDGES = [(file, line, module) for file, path in FILES.items() for line, module in imports(path)]


def test_an_import_goes_to_the_same_room_or_to_one_before_it() -> None:
    up = [
        f"{file}:{line} ({room(file)}) imports {module} ({room(module)})"
        for file, line, module in EDGES
        if ROOMS.index(room(module)) > ROOMS.index(room(file))
    ]
    assert up == []


@pytest.mark.parametrize("house", ["capture", "execution", "passes", "training"])
def test_the_folders_of_a_room_form_no_circle(house: str) -> None:
    found: dict[str, set[str]] = {}
    for file, _, module in EDGES:
        ours, theirs = (each.relative_to(house).parts if each.is_relative_to(house) else () for each in (file, module))
        if len(ours) > 1 and theirs and (PACKAGE / house / theirs[0]).is_dir() and ours[0] != theirs[0]:
            found.setdefault(ours[0], set()).add(theirs[0])
    TopologicalSorter(found).prepare()  # CycleError where there is one
    if house == "passes":
        assert not any(b in found.get(a, ()) for a, b in permutations(("analyse", "rewrite", "execute"), 2))


def test_the_map_lists_the_rooms_in_this_order() -> None:
    table = (
        (PACKAGE.parent / "docs" / "background" / "architecture.md")
        .read_text(encoding="utf-8")
        .partition("## The house")[2]
    )
    first_columns = re.findall(r"^\| (`.*?`) \|", table.partition("## ")[0], re.MULTILINE)
    named = [name.removesuffix(".py").strip("/") for each in first_columns for name in re.findall(r"`(.+?)`", each)]
    assert named == list(ROOMS[:-1])


def test_folders_and_files_stay_small() -> None:
    folders = {folder: sum(file.parent == folder for file in FILES) for folder in {file.parent for file in FILES}}
    assert {str(folder): count for folder, count in folders.items() if count > 16} == {}
    lengths = {str(file): len(path.read_text(encoding="utf-8").splitlines()) for file, path in FILES.items()}
    assert {file: length for file, length in lengths.items() if length > 300} == {}


def test_tests_neither_import_nor_replace_what_is_private_to_the_package() -> None:
    found = []
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("fractrain_fx", "benchmarks")):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
                # setattr("a.module.name", value) or setattr(module, "name", value)
                place, *named = (ast.unparse(each).strip("\"'") for each in node.args[:2])
                names = [] if place.split(".")[0] == "torch" else [*place.split(".")[1:], *named]
            else:
                continue
            found += [f"{path.name}:{node.lineno} {name}" for name in names if re.match(r"_[^_]\w*$", name)]
    assert not found


def test_only_formats_ask_for_the_class_of_a_format_and_no_argument_says_how_to_round() -> None:
    found = []
    for file, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.arg) and node.arg in ("compiled", "triton"):
                found.append(f"{file}:{node.lineno} {node.arg}")
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance" and file.parts[0] != "formats":
                found += [f"{file}:{node.lineno} {ast.unparse(node)}"] * ("Format" in ast.unparse(node.args[1]))
    assert not found


# The same contract for two libraries.
_TWICE = {"FracTrainCallback", "WatchCallback"}


def test_a_class_name_has_one_meaning() -> None:
    places: dict[str, list[str]] = {}
    for file, path in FILES.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(file))
    assert {name: files for name, files in places.items() if len(files) > 1 and name not in _TWICE} == {}
