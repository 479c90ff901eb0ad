"""A report in headless Chromium, which must not print anything."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

__all__ = ["CHROMIUM", "NO_CHROMIUM", "opened"]

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NO_CHROMIUM = "no chromium on the PATH: apt-get install chromium"


@contextlib.contextmanager
def opened(report: Path, tab: str) -> Iterator[Any]:
    """The page of a report at one of its tabs."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip(NO_CHROMIUM)
    printed: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--headless", "--no-sandbox"])
        page: Any = browser.new_page()
        page.on("console", lambda message: printed.append(message.text))
        page.on("pageerror", lambda error: printed.append(str(error)))
        page.goto(report.as_uri())
        page.click(f"#tab-{tab}")
        page.wait_for_selector(f"html[data-ready={tab}]")
        yield page
        browser.close()
    assert printed == []
