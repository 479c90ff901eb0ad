"""The page in headless Chromium: it opens alone and without errors, and works by keyboard."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fractrain_fx.cli import main
from fractrain_fx.engine.steered import show_level
from tests.report.browser import CHROMIUM, NO_CHROMIUM

if CHROMIUM is None:
    pytest.skip(NO_CHROMIUM, allow_module_level=True)
pytestmark = pytest.mark.long
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")

QUIET = ("background-networking", "component-update", "sync", "quic", "gpu")
FLAGS = ["--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in QUIET)]


@pytest.fixture(scope="module")
def address(trained: Path, long: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("browser") / "report.html"
    runs = [str(long), str(trained / "fractrain"), str(trained / "pfq")]
    assert main(["report", *runs, "--out", str(out), "--epochs", "45", "2"]) == 0
    assert out.stat().st_size < 5e6
    return out.as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, env={**os.environ, "LANG": "C"})
        yield browser
        browser.close()


class Opened:
    """The page, what it asked of the network and what it printed."""

    def __init__(self, browser: Any, address: str, scheme: str = "light") -> None:
        self.page = browser.new_page(color_scheme=scheme)
        self.requests: list[str] = []
        self.printed: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.printed.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.printed.append(str(error)))
        self.page.goto(address)
        self.ready("trajectory")

    def ready(self, panel: str) -> None:
        self.page.wait_for_selector(f"html[data-ready={panel}]")

    def open(self, panel: str) -> None:
        self.page.click(f"#tab-{panel}")
        self.ready(panel)

    def until(self, script: str) -> None:
        """Wait until a script gives true; asked again from here, as the page's policy forbids the browser to."""
        for _ in range(300):
            if self.page.evaluate(script):
                return
            self.page.wait_for_timeout(100)
        raise AssertionError(f"did not become true: {script}")

    def focused(self) -> str:
        return str(self.page.evaluate("document.activeElement.id"))

    def table(self, figure: str) -> list[list[str]]:
        """The cells of a figure's data table, opened by keyboard; headings first."""
        self.page.focus(f"#figure-{figure} summary")
        if not self.page.evaluate(f"document.querySelector('#figure-{figure} details').open"):
            self.page.keyboard.press("Enter")
        self.page.wait_for_selector(f"#figure-{figure} details table")
        script = "table => [...table.rows].map(row => [...row.cells].map(cell => cell.textContent))"
        return list(self.page.eval_on_selector(f"#figure-{figure} details table", script))

    def marks(self, figure: str) -> int:
        return int(self.page.locator(f"#figure-{figure} .plot svg path").count())


@pytest.fixture
def opened(browser: Any, address: str) -> Iterator[Opened]:
    opened = Opened(browser, address)
    yield opened
    opened.page.close()
    assert opened.printed == []
    assert opened.requests == [address], "the page asked for something outside itself"


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_tab_draws_its_plots_without_errors_or_requests(browser: Any, address: str, scheme: str) -> None:
    opened = Opened(browser, address, scheme)
    assert opened.page.evaluate("document.documentElement.dataset.theme") == scheme
    for panel, least in {"trajectory": 2, "stages": 2, "bits": 2, "cost": 2, "machines": 1}.items():
        opened.open(panel)
        figures = opened.page.locator(f"#{panel} figure")
        assert figures.count() >= least
        for at in range(figures.count()):
            assert figures.nth(at).locator(".plot svg, .plot canvas").bounding_box()["width"] > 250
    assert (opened.printed, opened.requests) == ([], [address])
    opened.page.close()


def test_tabs_work_by_arrow_keys_and_take_one_stop(opened: Opened) -> None:
    opened.page.focus("#tab-trajectory")
    for key, panel in [("ArrowRight", "stages"), ("End", "settings"), ("ArrowRight", "trajectory")]:
        opened.page.keyboard.press(key)
        assert opened.focused() == f"tab-{panel}"
        opened.ready(panel)
        visible = opened.page.locator('[role="tabpanel"]:visible')
        assert visible.count() == 1 and visible.get_attribute("id") == panel
        selected = opened.page.locator('[role="tab"][aria-selected="true"]')
        assert (selected.count() == 1 and selected.get_attribute("tabindex") is None) or "0"
    opened.page.keyboard.press("Home")
    opened.page.keyboard.press("Tab")
    assert opened.focused() == "trajectory"  # not the next tab


def test_the_theme_is_the_systems_until_its_button_is_used(opened: Opened) -> None:
    root = "document.documentElement.dataset.theme"
    opened.page.emulate_media(color_scheme="dark")
    opened.until(f"{root} === 'dark'")
    opened.page.focus("#theme")
    opened.page.keyboard.press("Enter")
    assert opened.page.evaluate(root) == "light"
    assert opened.page.get_attribute("#theme", "aria-pressed") == "false"
    opened.page.keyboard.press("Space")
    assert opened.page.evaluate(root) == "dark" and opened.page.get_attribute("#theme", "aria-pressed") == "true"
    opened.page.wait_for_selector("#figure-trajectory-loss .plot svg")


def test_tables_behind_trajectories_have_the_numbers_of_the_metrics(opened: Opened, trained: Path, long: Path) -> None:
    table = opened.table("trajectory-accuracy")
    written = [row for run in (long, trained / "fractrain", trained / "pfq") for row in rows_of(run)]
    assert len(table) == 1 + len(written) == 169
    for cells, row in zip(table[1:], written, strict=True):
        assert (cells[1], cells[2]) == (str(row["epoch"]), show_level(row["level"]))
        assert float(cells[3]) == pytest.approx(row["test_accuracy"], rel=1e-5)
        assert float(cells[4]) == pytest.approx(100 * row["cp"], rel=1e-3)
        assert float(cells[5]) == pytest.approx(100 * row["cp_total"], rel=1e-3)
        assert float(cells[6]) == pytest.approx(row["total_macs"], rel=1e-4)


def test_another_cost_axis_draws_another_plot(opened: Opened) -> None:
    title = "#title-trajectory-accuracy"
    assert opened.page.text_content(title) == "Test accuracy against training cost so far"
    opened.page.focus("#trajectory-axis")
    opened.page.keyboard.press("ArrowDown")
    opened.until(f"document.querySelector('{title}').textContent.includes('energy')")
    opened.until("document.querySelector('#figure-trajectory-accuracy .plot').textContent.includes('BitFusion, J')")


def test_the_epoch_of_the_bit_allocation_moves_by_keyboard_and_by_button(opened: Opened, long: Path) -> None:
    opened.open("bits")
    opened.page.focus("#bits-epoch")
    opened.page.keyboard.press("ArrowLeft")
    title = "#title-allocation-resnet74"
    opened.until(f"document.querySelector('{title}').textContent.endsWith('epoch 159')")
    opened.page.focus("#bits [data-epoch='45']")
    opened.page.keyboard.press("Enter")
    opened.until(f"document.querySelector('{title}').textContent.endsWith('epoch 45')")
    assert opened.page.text_content("#title-allocation-fractrain") == "fractrain: options chosen, epoch 4"  # its last
    table = opened.table("allocation-resnet74")
    options = rows_of(long)[44]["options"]
    assert table[0][1:] == ["FW-0/BW-0", "FW-2/BW-6", "FW-3/BW-6", "FW-4/BW-6", "FW-4/BW-12", "FW-6/BW-8", "FW-6/BW-12"]
    assert [row[0] for row in table[1:]] == list(options) and len(options) == 36
    for row, shares in zip(table[1:], options.values(), strict=True):
        assert [float(cell) for cell in row[1:]] == pytest.approx([100 * share for share in shares], abs=0.051)
    assert opened.marks("allocation-resnet74") > 36


def test_cost_tables_have_the_numbers_of_the_result(opened: Opened, long: Path) -> None:
    opened.open("cost")
    opened.page.select_option("#cost-scope", "best")
    opened.until("document.querySelector('#title-paths').textContent.includes('best')")
    paths = json.loads((long / "result.json").read_text())["hardware"]["best"]["by_path"]
    table = opened.table("paths")
    for cells, amount in zip(table[1:4], paths.values(), strict=True):
        assert float(cells[3]) == pytest.approx(amount["joules"], rel=1e-3)
        assert float(cells[4]) == pytest.approx(amount["seconds"], rel=1e-3)
    assert len(opened.table("blocks-resnet74")) == 1 + 3 * 38  # 36 blocks, stem and head


def test_machines_have_a_bar_and_a_row_for_each_run(opened: Opened, long: Path) -> None:
    opened.open("machines")
    table = opened.table("machines")
    assert len(table) == 1 + 3 * 10 and opened.marks("machines") >= 3 * (10 + 8)  # bars, and bfloat16 of eight GPUs
    found = {each["machine"]: each for each in json.loads((long / "result.json").read_text())["machines"]}
    rows = [cells for cells in table[1:] if cells[1] == "resnet74"]
    assert [cells[0] for cells in rows] == list(found)
    for cells in rows:
        each = found[cells[0]]
        assert float(cells[2]) == pytest.approx(each["seconds"], rel=1e-3)
        assert float(cells[3]) == pytest.approx(each["float32"], rel=1e-3)
    assert opened.page.locator("#figure-machines .plot svg text", has_text=" ms").count() > 0


def test_settings_show_what_differs_until_asked_for_all(opened: Opened) -> None:
    opened.open("settings")
    batch = opened.page.locator("#configuration tr", has_text="weight_decay")
    assert not batch.is_visible()
    opened.page.focus("#differing")
    opened.page.keyboard.press("Space")
    assert batch.is_visible()
    opened.page.focus("[data-copy]")
    opened.page.keyboard.press("Enter")
    opened.until("document.getElementById('status').textContent.startsWith('Command')")


@pytest.mark.parametrize("kind", ["svg", "png", "csv"])
def test_a_plot_and_its_data_can_be_saved(opened: Opened, kind: str, tmp_path: Path) -> None:
    with opened.page.expect_download() as download:
        opened.page.click(f"#figure-trajectory-loss [data-save={kind}]")
    download.value.save_as(tmp_path / "saved")
    start = (tmp_path / "saved").read_bytes()[:60]
    assert start.startswith({"svg": b"<svg", "png": b"\x89PNG", "csv": b"run,epoch,stage,training loss,"}[kind])


def test_runs_of_another_measure_and_without_stages_or_gates_are_drawn_too(
    browser: Any, trained: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.jsonl"
    unpriced = {"bitfusion_joules": None, "bitfusion_seconds": None}  # as of a run in a format of blocks
    rows = [row | unpriced for row in rows_of(trained / "pfq")]
    text.write_text("".join(json.dumps(row).replace("test_accuracy", "test_perplexity") + "\n" for row in rows))
    out = tmp_path / "report.html"
    assert main(["report", str(text), str(trained / "static"), "--out", str(out)]) == 0
    opened = Opened(browser, out.as_uri())
    assert opened.marks("trajectory-perplexity") > 5 < opened.marks("trajectory-accuracy")
    opened.page.select_option("#trajectory-axis", "joules")
    opened.page.wait_for_selector("#figure-trajectory-perplexity >> text=None of these runs kept this.")
    opened.page.select_option("#trajectory-axis", "epoch")
    opened.page.wait_for_selector("#figure-trajectory-perplexity .plot svg")
    for panel in ("stages", "cost", "settings"):
        opened.open(panel)
    assert opened.page.locator("#tab-bits").count() == 0
    assert (opened.printed, opened.requests) == ([], [out.as_uri()])
    opened.page.close()
