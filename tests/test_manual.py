"""The manual stays short: words of its pages and of its sentences, without code and without generated tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(page for page in DOCS.glob("**/*.md") if "results" not in page.relative_to(DOCS).parts)
# Pages whose tables are generated whole; the others mark generated parts.
_GENERATED = ("results.md", "coverage.md", "format-results.md", "paper.md")
_PART = re.compile(r"^<!-- ([\w. -]+) -->.*?^<!-- /\1 -->", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\|.*$", re.MULTILINE)
_DOCSTRING = re.compile(r"^:::.*\n(?:    .*\n)*", re.MULTILINE)  # mkdocstrings puts it there
_END = re.compile(r"(?<=[.:?!])\s+(?=[A-Z`*\[(-])")


def words_of(page: Path) -> list[str]:
    return [word for word in _written(page).split() if word.strip("|:-")]  # without the lines of tables


def _written(page: Path) -> str:
    text = _DOCSTRING.sub("", _CODE.sub("", _PART.sub("", page.read_text(encoding="utf-8"))))
    return _ROW.sub("", text) if page.name in _GENERATED else text


def _sentences(page: Path) -> list[int]:
    """The words of each sentence."""
    prose = re.sub(r"^#.*$", "", _ROW.sub("", _written(page)), flags=re.MULTILINE)
    return [n for part in _END.split(" ".join(prose.split())) if (n := len(part.split())) > 2]


def test_the_manual_has_at_most_30_000_words() -> None:
    assert sum(len(words_of(page)) for page in PAGES) <= 30_000


def test_the_readme_is_read_in_two_minutes() -> None:
    readme = DOCS.parent / "README.md"
    text = readme.read_text(encoding="utf-8")
    assert len(words_of(readme)) < 500
    pictures, tables = text.count("\n!["), re.findall(r"^\|[-|]+\|$", text, re.MULTILINE)
    assert (pictures, len(tables)) == (1, 1)
    assert all(word in text for word in ("## Why", "make demo", "save_pretrained", "from_pretrained", "is not for"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_a_page_is_short(page: Path) -> None:
    assert len(words_of(page)) <= 1_200


def test_sentences_are_short() -> None:
    lengths = [words for page in PAGES for words in _sentences(page)]
    assert sum(lengths) / len(lengths) < 20
