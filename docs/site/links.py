"""A hook of mkdocs: the links of the pages lead to the same places on the site as in the repository.

README.md becomes the first page, and notebooks become pages. What a page links to outside of docs/ gets a page of its
own: Markdown files as they are, other files as listings, folders as lists of their files.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)

_SOURCES: dict[str, Path] = {}  # what stands on each page that is made here


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the first page, and pages for everything outside of docs/ that a page links to."""
    _add(files, config, ROOT / "README.md")
    for notebook in sorted((ROOT / "docs" / "tutorials").glob("*.ipynb")):
        _add(files, config, notebook)
    pending = [(ROOT / "docs" / file.src_uri) for file in files.documentation_pages() if file.abs_src_path is not None]
    pending.append(ROOT / "README.md")
    seen: set[Path] = set(pending)
    while pending:
        page = pending.pop()
        for link in _LINK.finditer(_CODE.sub("", page.read_text(encoding="utf-8"))):
            target = (page.parent / link[2]).resolve()
            if target in seen or not target.exists() or target.is_relative_to(ROOT / "docs"):
                continue
            seen.add(target)
            _add(files, config, target)
            if target.suffix == ".md":
                pending.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links as they are in the repository into links between the site's pages."""
    source = _repository_path(page.file.src_uri)

    def turned(link: re.Match[str]) -> str:
        target = (source.parent / link[2]).resolve()
        if not target.exists():
            return link[0]  # mkdocs reports it
        place = posixpath.relpath(_site_path(target), posixpath.dirname(page.file.src_uri) or ".")
        return f"{link[1]}{place}{link[3]}"

    parts, start = [], 0
    for code in _CODE.finditer(markdown):
        # A link whose text is code begins before it and ends after it: only its end has to be seen.
        parts += [_LINK.sub(turned, markdown[start : code.start()]), code[0]]
        start = code.end()
    return "".join([*parts, _LINK.sub(turned, markdown[start:])])


def _add(files: Files, config: MkDocsConfig, path: Path) -> None:
    if path.is_dir():
        names = sorted(each.name for each in path.iterdir() if each.is_file() and not each.name.startswith("."))
        content = "\n".join([f"# {path.relative_to(ROOT)}/", "", *(f"- `{name}`" for name in names), ""])
    elif path.suffix == ".md":
        content = path.read_text(encoding="utf-8")
    elif path.suffix == ".ipynb":
        content = _notebook(path)
    else:
        text = path.read_text(encoding="utf-8")
        content = f"# {path.relative_to(ROOT)}\n\n````{path.suffix.removeprefix('.') or 'text'}\n{text}\n````\n"
    _SOURCES[_site_path(path)] = path
    files.append(File.generated(config, _site_path(path), content=content))


def _notebook(path: Path) -> str:
    """The cells of a notebook as Markdown: text as it is, code and what it printed in fences."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        printed = "".join(line for output in cell.get("outputs", ()) for line in output.get("text", ()))
        parts += [f"```text\n{printed.rstrip()}\n```"] if printed else []
    return "\n\n".join(parts) + "\n"


def _site_path(path: Path) -> str:
    """Where a file of the repository is on the site, as mkdocs counts: from docs/, before Markdown becomes HTML."""
    if path == ROOT / "README.md":
        return "index.md"
    if path.is_relative_to(ROOT / "docs"):
        inside = path.relative_to(ROOT / "docs")
        return (inside.with_suffix(".md") if inside.suffix == ".ipynb" else inside).as_posix()
    name = path.relative_to(ROOT).as_posix()
    return f"repository/{name}" if path.suffix == ".md" else f"repository/{name}.md"


def _repository_path(site_path: str) -> Path:
    return _SOURCES.get(site_path, ROOT / "docs" / site_path)
