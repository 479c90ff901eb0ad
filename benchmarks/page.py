"""Results inside a hand-written Markdown page: each benchmark rewrites the text between its two markers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["markdown_table", "write_section"]


def write_section(page: Path, name: str, text: str) -> None:
    """Replace the text between ``<!-- name -->`` and ``<!-- /name -->``; a missing page is made.

    Raises:
        ValueError: the page exists without such a pair of markers, or with several.
    """
    first, last = f"<!-- {name} -->", f"<!-- /{name} -->"
    section = f"{first}\n\n{text.strip()}\n\n{last}"
    if not page.exists():
        page.write_text(section + "\n", encoding="utf-8")
        return
    old = page.read_text(encoding="utf-8")
    pattern = re.compile(re.escape(first) + ".*?" + re.escape(last), re.DOTALL)
    if len(pattern.findall(old)) != 1:
        raise ValueError(f"{page} needs one pair of lines {first} and {last}: the table goes between them")
    page.write_text(pattern.sub(lambda _: section, old), encoding="utf-8")


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> str:
    """A Markdown table; all columns except the first ``text_columns`` are aligned to the right."""
    rule = ["---" if column < text_columns else "---:" for column in range(len(head))]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |"
        for line in (head, rule, *rows)
    )
