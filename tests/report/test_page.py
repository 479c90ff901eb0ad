"""The written files: one page that needs nothing else, and the plots beside it; what is said when that fails."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fractrain_fx import FracConfig, Pin, Precision, RunConfig
from fractrain_fx.cli import main
from fractrain_fx.errors import RunError
from fractrain_fx.report.page import pack_rows
from fractrain_fx.report.panels import build_sheet
from fractrain_fx.report.runs import Run, read_runs
from fractrain_fx.report.sheet import Panel
from fractrain_fx.summary.numbers import plain_number
from fractrain_fx.training import RunSettings


def report(*arguments: object) -> int:
    return main(["report", *map(str, arguments)])


class Links(HTMLParser):
    """What a browser would fetch, the labels that elements refer to, and the elements' own."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.named: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "action", "data", "poster", "srcset"):
                self.fetched.append(value or "")
            elif name in ("aria-labelledby", "aria-describedby", "aria-controls", "for"):
                self.named += (value or "").split()
            elif name == "id":
                self.ids.append(value or "")


@pytest.fixture(scope="module")
def page(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("page") / "new folder" / "report.html"
    assert report(*(trained / name for name in ("fractrain", "pfq", "static")), "--out", out) == 0
    return out.read_text(encoding="utf-8")


def test_the_page_refers_to_nothing_outside_itself(page: str) -> None:
    found = Links()
    found.feed(page)
    assert [link for link in found.fetched if not link.startswith(("#", "data:"))] == []
    assert "default-src 'none'" in page and "url(" not in page.split("</style>")[0] and "@import" not in page


def test_everything_that_a_label_names_is_there_once(page: str) -> None:
    found = Links()
    found.feed(page)
    assert set(found.named) <= set(found.ids) and len(found.ids) == len(set(found.ids))
    assert found.tags.count("h1") == 1 and found.tags.count("figure") == page.count('role="img"') > 5


def test_the_summary_has_the_results_numbers(page: str, trained: Path) -> None:
    rows = re.findall(r'<tr><th scope="row">.*?</tr>', page, re.DOTALL)
    for name, row in zip(("fractrain", "pfq", "static"), rows, strict=False):
        result = json.loads((trained / name / "result.json").read_text())
        cells = re.findall(r'<td class="number">(.*?)</td>', row)
        assert cells[:6] == [
            "4",
            f"{result['value']:.2f}",
            f"{result['best']:.2f} ({result['best_epoch']})",
            f"{100 * result['mean_cp']:.2f}",
            f"{100 * result['mean_cp_total']:.2f}",
            f"{result['total_macs']:.3e}",
        ]
        assert cells[6] == plain_number(result["hardware"]["end"]["total"]["joules"])
        assert cells[9] == (", ".join(map(str, result["turning_points"])) or "-")


def test_settings_and_commands_are_those_of_the_runs(page: str) -> None:
    assert re.search(r"<code>method</code></th><td>fractrain</td><td>pfq</td><td>static</td>", page)
    assert re.search(r"<tr data-same><th scope=\"row\"><code>batch_size</code></th><td>32</td>", page)
    assert page.count("<code>fractrain train --model") == 3


def test_a_runs_name_is_text_wherever_it_stands(trained: Path, tmp_path: Path) -> None:
    name = "</script><b>a'b\\"
    assert report(f"{name}={trained / 'fractrain'}", "--out", tmp_path / "page.html") == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    found = Links()
    found.feed(page)
    assert "b" not in found.tags
    assert page.count("</script>") == page.count("<script")


@pytest.mark.long
def test_plots_are_written_as_svg_and_png(trained: Path, tmp_path: Path) -> None:
    plots = tmp_path / "plots"
    assert report(trained / "fractrain", "--out", tmp_path / "page.html", "--plots", plots, "--epochs", 2, 4) == 0
    names = {path.stem for path in plots.glob("*.svg")}
    assert names == {path.stem for path in plots.glob("*.png")}
    assert {"trajectory-accuracy-macs", "trajectory-loss-epoch", "cost-fractrain", "stages-measured-step"} <= names
    assert {"allocation-fractrain-2", "allocation-fractrain-4", "bits-fractrain", "paths-joules-end"} <= names
    assert "blocks-fractrain-macs-end" in names and "allocation-fractrain-3" not in names
    for path in plots.glob("*.svg"):
        assert len([*ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}path")]) > 5, path.name
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in plots.glob("*.png"))


def test_a_run_of_one_epoch_is_a_point(trained: Path, tmp_path: Path) -> None:
    run, plots = tmp_path / "run", tmp_path / "plots"
    run.mkdir()
    first, *_ = (trained / "static" / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(first, encoding="utf-8")
    assert report(run, f"long={trained / 'pfq'}", "--out", tmp_path / "page.html", "--plots", plots) == 0
    for name in ("trajectory-accuracy-macs", "trajectory-loss-epoch"):
        marks = ElementTree.parse(plots / f"{name}.svg").iter("{http://www.w3.org/2000/svg}path")
        circles = [mark for mark in marks if mark.get("aria-roledescription") == "circle"]
        assert ["run: run" in str(mark.get("aria-label")) for mark in circles if mark.get("opacity") != "0"] == [True]


@pytest.mark.long
def test_a_run_without_a_finite_measure_is_reported_without_a_best_evaluation(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained / "static", run, ignore=shutil.ignore_patterns("checkpoint-*"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row | {"test_accuracy": None}) + "\n" for row in rows))
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    result |= {"value": math.nan, "best": math.nan, "best_epoch": 0}
    result["hardware"]["best"]["by_block"] = {}  # the cost of no epoch
    (run / "result.json").write_text(json.dumps(result))
    assert report(run, "--out", tmp_path / "alone.html", "--plots", tmp_path / "plots") == 0
    for names, scopes in ([run], ["end"]), ([run, trained / "pfq"], ["end", "best"]):
        sheet = build_sheet(read_runs([str(name) for name in names]))
        (cost,) = (panel for panel in sheet.panels if panel.key == "cost")
        assert list(cost.controls[1].choices) == scopes
        assert cost.notes[-1] == "run: no finite measure, so no best evaluation to sum cost up to."
        own = next(figure for figure in cost.figures if figure.key == "blocks-run")
        assert list(own.variants) == ["macs-end", "joules-end", "seconds-end"]
        assert {row["run"] for row in sheet.tables.get("paths-best", [])} == {name.name for name in names[1:]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fractrain", "--epochs", "9"], "epoch 9 is in none of these runs: write some of 1 to 4"),
        (["static", "--epochs", "2"], "none of these runs has gates"),
        (["static", "--out", "static/result.json/page.html"], "give another --out"),
        (["static", "--out", "."], ". is a folder: name a file, --out report.html"),
        (["static", "--out", "static"], "static is a folder: name a file, --out static/report.html"),
        (["static", "--plots", "static/result.json"], "give another folder"),
    ],
)
def test_what_cannot_be_done_is_refused(
    arguments: list[str],
    message: str,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("fractrain", "static"):
        shutil.copytree(trained / name, tmp_path / name, ignore=shutil.ignore_patterns("checkpoint-*"))
    monkeypatch.chdir(tmp_path)
    assert report(*arguments) == 2
    assert message in capsys.readouterr().err


def test_without_its_libraries_the_command_says_what_to_install(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("altair", "jinja2") else find(name))
    assert report(trained / "static") == 2
    told = capsys.readouterr().err
    assert "a report needs altair and jinja2: pip install 'fractrain_fx[report]'" in told


@pytest.mark.long
def test_runs_that_leave_work_out_are_not_called_simulations(trained: Path) -> None:
    first, second = read_runs([str(trained / name) for name in ("fractrain", "static")])
    assert first.settings is not None
    frac = first.settings.frac.replace(**{"run.skipping": "left-out"})
    lighter = replace(first, settings=replace(first.settings, frac=frac))
    for runs, told in (([first], (False, True)), ([lighter], (True, False)), ([lighter, second], (True, True))):
        notes = " ".join(next(panel for panel in build_sheet(runs).panels if panel.key == "stages").notes)
        assert ("left out of it" in notes, "simulated in float here" in notes) == told


def test_runs_that_torchao_computes_are_said_to_be_in_its_numbers(trained: Path) -> None:
    first, second = read_runs([str(trained / name) for name in ("static", "fractrain")])
    assert first.settings is not None
    frac = FracConfig(method="static", format="fp8", run=RunConfig(torchao=True))
    swapped = replace(first, settings=replace(first.settings, frac=frac))
    for runs, simulated in (([swapped], False), ([swapped, second], True)):
        notes = " ".join(next(panel for panel in build_sheet(runs).panels if panel.key == "stages").notes)
        assert f"In {first.name} torchao computes linear layers" in notes
        assert ("simulated in float here" in notes) == simulated


def test_how_gates_choose_by_input_has_a_panel_with_pictures(trained: Path, page: str) -> None:
    sheet = build_sheet(read_runs([str(trained / name) for name in ("fractrain", "pfq")]))
    panel = next(panel for panel in sheet.panels if panel.key == "inputs")
    assert [figure.key for figure in panel.figures] == ["information", "samples-fractrain"]
    assert [row["epoch"] for row in sheet.tables["information"]] == [1, 2, 3, 4]
    rows = sheet.tables["samples-fractrain"]
    assert {row["end"] for row in rows} == {"fewest bits", "most bits"} and rows[0]["cp"] <= rows[-1]["cp"]
    assert all(row["picture"].startswith("data:image/png;base64,") for row in rows) and "samples-fractrain" in page
    assert all(panel.key != "inputs" for panel in build_sheet(read_runs([str(trained / "pfq")])).panels)
    (trained / "fractrain" / "samples.json").rename(trained / "aside")
    try:
        (trained / "fractrain" / "samples.json").write_text("[{}]")
        with pytest.raises(RunError, match="holds no samples"):
            read_runs([str(trained / "fractrain")])
    finally:
        (trained / "aside").replace(trained / "fractrain" / "samples.json")


def machines_panel(runs: list[Run]) -> Panel | None:
    return next((panel for panel in build_sheet(runs).panels if panel.key == "machines"), None)


def with_machines(run: Run, **changes: object) -> Run:
    assert run.result is not None
    machines = tuple(replace(each, **changes) for each in run.result.machines)  # type: ignore[arg-type]
    return replace(run, result=replace(run.result, machines=machines))


@pytest.mark.long
def test_machines_show_finished_runs_and_say_what_has_no_price(trained: Path) -> None:
    first, second = read_runs([str(trained / name) for name in ("fractrain", "static")])
    panel = machines_panel([first, second])
    assert panel is not None
    (figure,), notes = panel.figures, " ".join(panel.notes)
    assert first.result is not None
    h200 = next(each for each in first.result.machines if each.machine == "h200")
    times = [plain_number(1000 * each) for each in (h200.seconds, h200.float32) if each is not None]
    assert f"fractrain on h200: {times[0]} ms, {times[1]} ms in float32, " in figure.summary
    assert "An asterisk marks" in notes and "Contractions alone have a price on bitfusion and zc706" in notes
    assert "No figure for energy is known of zc706" in notes and "has no price for" not in notes
    partly = machines_panel([with_machines(first, unpriced=("a", "b"))])
    assert partly is not None
    assert "l4 has no price for 2 contractions of fractrain, such as a, b: its numbers are" in " ".join(partly.notes)
    without = machines_panel([with_machines(first, seconds=None, unpriced=("a",)), second])
    assert without is not None and "of fractrain, such as a: is left out" in " ".join(without.notes)
    assert "fractrain on" not in without.figures[0].summary


def test_the_machines_of_a_run_take_little_of_the_page(trained: Path) -> None:
    sheets = [build_sheet(read_runs([str(trained / name) for name in names])) for names in (["pfq"], ["pfq", "static"])]
    sizes = [len(pack_rows(sheet.tables["machines"])) for sheet in sheets]
    assert sizes[0] < 3000 and sizes[1] - sizes[0] < 2000  # bytes


def test_costs_have_a_logarithmic_axis_and_epochs_a_plain_one(trained: Path) -> None:
    sheet = build_sheet(read_runs([str(trained / name) for name in ("fractrain", "pfq")]))
    (panel,) = (each for each in sheet.panels if each.key == "trajectory")
    for figure in panel.figures:
        for axis, variant in figure.variants.items():
            scale = variant.spec["layer"][0]["encoding"]["x"]["scale"]
            assert (scale.get("type") == "log") == (axis != "epoch"), axis
            assert f"datum['{axis}'] > 0" in json.dumps(variant.spec), "a logarithmic axis has no 0"


def test_the_header_names_formats_and_pins(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained / "static", folder, ignore=shutil.ignore_patterns("checkpoint-*"))
    settings = RunSettings.from_yaml(folder / "config.yaml")
    pins = (Pin("last", format="bfloat16"), Pin("block.*", Precision(8, 16)))
    frac = settings.frac.replace(format="mx", recipe="mxfp8", pins=pins)
    replace(settings, frac=frac).to_yaml(folder / "config.yaml")
    assert report(folder, "--out", tmp_path / "page.html") == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "static FW-8/BW-8, mxfp8, pins last=bfloat16 block.*=FW-8/BW-16<" in page
