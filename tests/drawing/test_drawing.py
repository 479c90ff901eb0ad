"""Drawings hold every block and op once, in formats that other programs read."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import networkx as nx
import pydot
import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import FracModel, Pin, Precision
from fractrain_fx.cli import main
from fractrain_fx.drawing import draw
from fractrain_fx.drawing.build import Level, picture
from fractrain_fx.drawing.picture import Arrow, Picture
from fractrain_fx.errors import ConfigError, RunError
from tests.build import paper
from tests.build import rewritten as build_rewritten
from tests.models import build, thinned

GOLDEN = Path(__file__).parent / "golden"
DOCS = Path(__file__).parents[2] / "docs"
MODELS = thinned(["resnet18", "vit_tiny_patch16_224", "llama", "t5", "multihead_attention"], 2)
needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")


class Bottleneck(nn.Module):
    """Two convolutions with an identity or a projection skip."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(width, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.norm = nn.BatchNorm2d(out)
        self.shortcut = nn.Conv2d(width, out, 1) if out != width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return (self.shortcut(x) + self.norm(self.two(self.one(x).relu()))).relu()


def small_net() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3, padding=1), Bottleneck(8, 8), Bottleneck(8, 16)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))


def small(**fields: Any) -> FracModel:
    return build_rewritten(small_net(), torch.randn(2, 3, 8, 8), config=paper(**fields))


@cache
def rewritten(name: str) -> FracModel:
    return build_rewritten(build(name), config=paper())


def named(drawn: Picture, kind: str) -> list[str]:
    return [shape.id.removeprefix(f"{kind} ") for shape in drawn.shapes.values() if shape.kind == kind]


@pytest.mark.parametrize("name", MODELS)
def test_every_block_op_gate_and_skip_is_there_once(name: str) -> None:
    model = rewritten(name)
    gated = [block.name for block in model.blocks if block.gated]
    skippable = [block.name for block in model.blocks if block.skip]
    coarse, fine = picture(model, "blocks"), picture(model, "ops")
    assert Counter(named(coarse, "block")) == Counter(block.name for block in model.blocks)
    assert Counter(named(coarse, "op")) == Counter(op.name for op in model.ops if op.block is None)
    assert Counter(named(fine, "op")) == Counter(op.name for op in model.ops)
    assert set(fine.blocks) == {block.name for block in model.blocks}
    assert {shape.block for shape in fine.shapes.values() if shape.kind == "op"} == {op.block for op in model.ops}
    for drawn in (coarse, fine):
        assert named(drawn, "gate") == gated and sorted(named(drawn, "add")) == sorted(skippable)
        assert {"input", "output", "controller", "cost"} <= {shape.kind for shape in drawn.shapes.values()}
        steered = {arrow.source for arrow in drawn.arrows if arrow.kind == "choice"}
        assert steered == {f"gate {block}" for block in gated}
        assert sum(arrow.kind == "state" for arrow in drawn.arrows) == len(gated)
        assert sum(shape.macs or 0 for shape in drawn.shapes.values()) == model.macs


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("level", ["blocks", "ops"])
def test_data_flows_from_the_input_through_every_block_without_a_circle(name: str, level: Level) -> None:
    drawn = picture(rewritten(name), level)
    paths = nx.DiGraph((a.source, a.target) for a in drawn.arrows if a.kind in ("data", "skip"))
    assert nx.is_directed_acyclic_graph(paths)
    inputs = [shape.id for shape in drawn.shapes.values() if shape.kind == "input"]
    reached = set().union(*(nx.descendants(paths, each) for each in inputs))
    assert "output" in reached and {f"add {name}" for name in named(drawn, "add")} <= reached


def test_skip_paths_lead_past_the_block_to_its_add() -> None:
    drawn = picture(small(), "blocks")
    skips = [(arrow.source, arrow.target) for arrow in drawn.arrows if arrow.kind == "skip"]
    assert skips == [("block 0", "add 1"), ("add 1", "add 2")]
    fine = picture(small(), "ops")  # here the projection of the second block is a contraction of its own
    skips = [(arrow.source, arrow.target) for arrow in fine.arrows if arrow.kind == "skip"]
    assert skips == [("op 0", "add 1")]
    assert Arrow("op 2.shortcut", "add 2", "data") in fine.arrows
    assert [shape.bits["forward"] for shape in drawn.shapes.values() if shape.id == "block 1"] == [(2, 6)]


def test_masks_are_inputs_of_blocks_and_shapes_are_drawn_on_request() -> None:
    model = rewritten("llama")
    for level, kind in (("blocks", "block"), ("ops", "step")):
        arrows = picture(model, level).arrows  # type: ignore[arg-type]
        assert sum(a.source == "input attention_mask" and a.target.startswith(kind) for a in arrows) == 2
    drawn = picture(small(), "blocks", shapes=True).shapes
    assert drawn["block 2"].tensors == "Nx8x8x8 -> Nx16x8x8" and drawn["block 2"].tensors in drawn["block 2"].lines
    assert "Nx16 -> Nx4" in picture(small(), "ops", shapes=True).shapes["op 5"].lines
    assert not any("->" in line for shape in picture(small(), "ops").shapes.values() for line in shape.lines)


@pytest.mark.parametrize("level", ["blocks", "ops"])
def test_the_dot_file_of_a_small_model_is_the_golden_one(
    level: Level, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    pins = (Pin("1.two", Precision(8, 16)),)
    (drawn,) = draw(small(pins=pins), tmp_path / "small.dot", level=level)
    golden = GOLDEN / f"small-{level}.dot"
    if request.config.getoption("--regenerate"):
        golden.write_text(drawn.read_text(encoding="utf-8"), encoding="utf-8")
    assert drawn.read_text(encoding="utf-8") == golden.read_text(encoding="utf-8"), "pytest --regenerate renews it"


@pytest.mark.parametrize("name", thinned(["t5", "vit_tiny_patch16_224"], 2))
def test_dot_is_read_back_with_every_op(name: str, tmp_path: Path) -> None:
    model = rewritten(name)
    (file,) = draw(model, tmp_path / "drawn.dot", level="ops")
    graphs = pydot.graph_from_dot_file(str(file))
    assert graphs is not None
    (read,) = graphs
    nodes = Counter(node.get_name().strip('"') for each in _graphs(read) for node in each.get_nodes())
    assert all(nodes[f"op {op.name}"] == 1 for op in model.ops)
    frames = {each.get_name().strip('"') for each in _graphs(read)}
    assert {f"cluster_{block.name}" for block in model.blocks} <= frames


def _graphs(graph: Any) -> list[Any]:
    return [graph, *(inner for each in graph.get_subgraphs() for inner in _graphs(each))]


@needs_dot
def test_svg_and_png_are_drawn_by_graphviz(tmp_path: Path) -> None:
    model = rewritten("vit_tiny_patch16_224")
    for level in ("blocks", "ops"):
        (svg,) = draw(model, tmp_path / f"{level}.svg", level=level)
        page = ElementTree.parse(svg).getroot()
        titles = Counter(each.text for each in page.iter("{http://www.w3.org/2000/svg}title"))
        drawn = picture(model, level)
        assert all(titles[shape] == 1 for shape in drawn.shapes)
        assert "http" not in svg.read_text(encoding="utf-8").split("<g id", 1)[1].replace("http://www.w3.org/", "")
    (png,) = draw(small(), tmp_path / "small.png")
    assert png.read_bytes().startswith(b"\x89PNG")


@needs_dot
def test_graphviz_warns_of_nothing(tmp_path: Path) -> None:
    (file,) = draw(rewritten("t5"), tmp_path / "t5.dot", level="ops")
    run = subprocess.run(["dot", "-Tsvg", str(file)], capture_output=True, text=True, check=True)
    assert run.stderr == ""


@pytest.mark.parametrize(
    ("page", "file", "level"),
    [("background/concepts", "residual", "ops"), ("how-to/looking", "resnet10t-blocks", "blocks")],
)
def test_drawings_on_the_pages_show_what_the_pages_make(page: str, file: str, level: Level) -> None:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    first = re.search(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert first is not None
    names: dict[str, Any] = {}
    exec(first[1], names)
    drawing = ElementTree.parse(DOCS / "drawings" / f"{file}.svg").getroot()
    titles = {each.text for each in drawing.iter("{http://www.w3.org/2000/svg}title")}
    assert set(picture(names["model"], level).shapes) <= titles, "draw it again"


def test_without_graphviz_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunError, match=r"apt install graphviz.*write small\.dot instead"):
        draw(small(), tmp_path / "small.svg")
    assert draw(small(), tmp_path / "small.dot") == [tmp_path / "small.dot"]


def test_graphml_is_read_back_with_what_is_known(tmp_path: Path) -> None:
    model = small(method="pfq")
    (file,) = draw(model, tmp_path / "small.graphml", level="ops")
    read = nx.read_graphml(file)
    ops = {name: facts for name, facts in read.nodes(data=True) if facts["kind"] == "op"}
    assert set(ops) == {f"op {op.name}" for op in model.ops}
    assert sum(facts["macs"] for facts in ops.values()) == model.macs
    assert ops["op 1.one"]["mode"] == "scheduled" and ops["op 1.one"]["forward_bits_high"] == 8
    assert ops["op 0"]["reason"] == "first contraction"
    assert "stage" in read and {facts["kind"] for *_, facts in read.edges(data=True)} == {"data", "skip", "cost"}


@pytest.mark.parametrize("method", ["float", "static", "slu"])
def test_every_method_can_be_drawn(method: str, tmp_path: Path) -> None:
    for level in ("blocks", "ops"):
        (file,) = draw(small(method=method), tmp_path / "net.dot", level=level)
        assert pydot.graph_from_dot_file(str(file)) is not None


def test_bad_input_says_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.svg"):
        draw(small(), tmp_path / "small.jpeg")
    with pytest.raises(ConfigError, match="blocks, ops"):
        draw(small(), tmp_path / "small.dot", level="nodes")  # type: ignore[arg-type]
    with pytest.raises(RunError, match="could not be written"):
        draw(small(), tmp_path / "nowhere" / "small.dot")


@pytest.mark.long
def test_the_command_draws_and_still_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "net.dot"
    assert main(["inspect", "timm:resnet10t", "--image-size", "32", "--json", "--ops", "--draw", str(file)]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["model"] == "ResNet" and str(file) in printed.err
    assert "op layer1.0.conv1" in file.read_text(encoding="utf-8")
    assert main(["inspect", "timm:resnet10t", "--draw", str(tmp_path / "net.txt")]) == 2
    assert ".graphml" in capsys.readouterr().err
