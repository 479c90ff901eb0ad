"""A hook of mkdocs: pages of the reference whose lists are made from the package while the site is built.

A page says with a comment where its list goes: ``<!-- settings, made by docs/site/reference.py -->``.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import griffe

from fractrain_fx.cli.parser import COMMANDS, make_parser
from fractrain_fx.config import FracConfig, GateConfig, OperandRecipe, Pin, ProductRecipe, Recipe
from fractrain_fx.config.affine import AffineConfig
from fractrain_fx.config.precision import CostTargets
from fractrain_fx.config.run import RunConfig
from fractrain_fx.config.schedule import SCHEDULES, ByLength, Plateau
from fractrain_fx.training.settings import RunSettings, TrainSettings

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_WIDTH = 100
_PLACE = re.compile(r"<!-- ([\w ]+), made by docs/site/reference\.py -->")

# The settings of a method, with what stands before the name of each on the command line.
_METHOD: dict[type, str] = {
    FracConfig: "",
    GateConfig: "gate.",
    AffineConfig: "affine.",
    RunConfig: "run.",
    CostTargets: "targets.",
    Pin: "",
    **dict.fromkeys(SCHEDULES.values(), "schedule."),
    Recipe: "",
    ProductRecipe: "",
    OperandRecipe: "",
}


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the lists of a page where its comments ask for them."""
    return _PLACE.sub(lambda place: _LISTS[place[1]](), markdown)


def settings() -> str:
    """A table for each group of settings of a method."""
    return "\n\n".join(_table(kind, prefix) for kind, prefix in _METHOD.items())


def run_settings() -> str:
    """The settings of a run that are not settings of its method."""
    return "\n\n".join(_table(kind, "") for kind in (RunSettings, TrainSettings))


def commands() -> str:
    """The help of each command, as it prints it."""
    return "\n\n".join(f"## fractrain {name}\n\n```text\n{_help(name)}```" for name in COMMANDS)


_LISTS = {"settings": settings, "run settings": run_settings, "commands": commands}


def _help(command: str) -> str:
    printed = io.StringIO()
    with (
        patch.dict(os.environ, {"COLUMNS": str(_WIDTH)}),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        make_parser().parse_args([command, "--help"])
    return printed.getvalue()


def _table(kind: type, prefix: str) -> str:
    summary, meanings = _described(kind)
    hints = typing.get_type_hints(kind)
    rows = [
        f"| `{prefix}{each.name}` | {_type(hints[each.name])} | {_default(each)} | {meanings[each.name]} |"
        for each in fields(kind)
    ]
    head = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    return "\n".join([f"### {kind.__name__}", "", summary, "", *head, *rows])


def _described(kind: type) -> tuple[str, dict[str, str]]:
    """The first paragraph of a dataclass's docstring, and the meaning of each field; a base class may have it."""
    summary, meanings = "", {}
    # The docstring of `ByLength` describes the fields of all schedules that follow Algorithm 1.
    kinds = [*kind.__mro__, *([ByLength] if issubclass(kind, Plateau) else [])]
    for each in reversed([each for each in kinds if is_dataclass(each)]):
        for section in griffe.Docstring(inspect.getdoc(each) or "").parse("google"):
            if section.kind is griffe.DocstringSectionKind.attributes:
                found: Any = section.value
                meanings |= {one.name: _cell(one.description) for one in found}
            elif section.kind is griffe.DocstringSectionKind.text:
                summary = _linked(str(section.value).partition("\n\n")[0])
    return summary, meanings


def _type(hint: Any) -> str:
    """A type in words: the choices of a ``Literal``, the names of classes."""
    return " or ".join(dict.fromkeys(_types(hint)))


def _types(hint: Any) -> Iterator[str]:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        yield from (f"`{part!r}`" for part in parts)
    elif hint is type(None):
        yield "`None`"
    elif origin is tuple:
        yield f"a sequence of {_type(parts[0])}"
    elif parts:
        for part in parts:
            yield from _types(part)
    else:
        yield f"`{hint.__name__}`"


def _default(field: Field[Any]) -> str:
    if field.default_factory is not MISSING:
        return f"`{field.default_factory.__name__}()`"  # type: ignore[attr-defined]
    if field.default is MISSING:
        return ""
    value = field.default
    if isinstance(value, tuple) and value:
        return f"`{', '.join(map(str, value))}`"
    return f"`{type(value).__name__}()`" if is_dataclass(value) and "(" in str(value) else f"`{value}`"


def _cell(text: str) -> str:
    return " ".join(_linked(text).split()).replace("|", r"\|")


def _linked(text: str) -> str:
    """Roles of a docstring as code, and pages as links."""
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text)
    return re.sub(r"docs/([\w/-]+?([\w-]+)\.md)", r"[\2](../\1)", text)
