"""The lists that the site makes from the package have every setting and every command."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from fractrain_fx import FracConfig, errors
from fractrain_fx.cli.parser import COMMANDS
from fractrain_fx.config.plain import GROUPS
from fractrain_fx.training.flags import settings_text

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "site" / "reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(table: str) -> dict[str, list[str]]:
    """The cells of each setting, by its name."""
    lines = re.findall(r"^\| `([^`]+)` \| (.*) \|$", table, re.MULTILINE)
    return {name: re.split(r"(?<!\\) \| ", f"x | {cells}") for name, cells in lines}


def test_every_setting_has_a_row_with_type_and_meaning(reference: ModuleType) -> None:
    found = rows(reference.settings()) | rows(reference.run_settings())
    of_config = {each.name for each in fields(FracConfig)}
    of_groups = {f"{group}.{each.name}" for group, kind in GROUPS.items() for each in fields(kind)}
    on_command_line = set(re.findall(r"^(\S+) \(default", settings_text(), re.MULTILINE)) - {"format_recipe"}
    assert of_config | of_groups | on_command_line <= set(found)
    assert all(len(cells) == 4 and cells[1] and cells[3] for cells in found.values())


def test_a_row_has_the_default_and_the_words_of_the_setting(reference: ModuleType) -> None:
    _, kind, default, meaning = rows(reference.settings())["gate.control"]
    assert (kind, default) == ("`'sign'` or `'multiplier'`", "`sign`")
    assert "Lagrange" in meaning


def test_pages_that_a_docstring_names_are_links(reference: ModuleType) -> None:
    _, _, _, meaning = rows(reference.settings())["run.torchao"]
    assert "[torchao](../how-to/torchao.md)" in meaning


def test_every_command_has_the_help_that_it_prints(reference: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    text = reference.commands()
    assert re.findall(r"^## fractrain (\w+)$", text, re.MULTILINE) == list(COMMANDS)
    assert text.count("usage: fractrain") == len(COMMANDS) and "--fold-batch-norm" in text
    assert capsys.readouterr().out == ""


def test_a_list_stands_where_a_comment_asks_for_it(reference: ModuleType) -> None:
    pages = {name: (ROOT / "docs" / "reference" / f"{name}.md").read_text() for name in ("settings", "command-line")}
    for markdown in pages.values():
        shown = reference.on_page_markdown(markdown, None, None, None)
        assert "reference.py" not in shown and len(shown) > 3 * len(markdown)


def test_the_page_of_errors_lists_every_public_error() -> None:
    pattern = re.search(r'filters: \["(.*)"\]', (ROOT / "docs" / "reference" / "errors.md").read_text())
    assert pattern is not None
    shown = {name for name in errors.__all__ if re.search(pattern[1], name)}
    kinds = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)}
    assert shown == kinds
