"""The tree of blocks: complete, adding up, and the same on a terminal, in JSON and in a notebook."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import escape
from typing import Any
from xml.etree import ElementTree

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fractrain_fx import (
    AffineConfig,
    FracConfig,
    FracModel,
    Pin,
    Precision,
    RunConfig,
    Summary,
    fractrainify,
    plan,
    summarize,
)
from fractrain_fx.config.config import Method
from fractrain_fx.errors import FracTrainWarning
from fractrain_fx.summary.loud import loud_line
from fractrain_fx.summary.numbers import plain_number, short_number, time_unit
from fractrain_fx.summary.rows import Row, within_block
from tests.build import made_once, paper
from tests.build import rewritten as build_rewritten
from tests.models import build, some_long

MODELS = ["resnet18", "mobilenetv2_100", "vit_tiny_patch16_224", "bert", "tied_weights"]


@made_once
def rewritten(name: str, **fields: Any) -> FracModel:
    return build_rewritten(build(name), **fields)


def walk(summary: Summary) -> list[Row]:
    return [row for top in summary.rows() for row, _ in top.walk()]


@pytest.mark.parametrize("name", MODELS)
def test_every_block_and_op_is_one_row_and_modules_add_up(name: str) -> None:
    summary = summarize(rewritten(name), ops=True)
    rows = walk(summary)
    assert [row.name for row in rows if row.kind == "block"] == [block.name for block in summary.blocks]
    assert sum(row.kind == "op" for row in rows) == len(summary.ops)
    assert sum(row.macs or 0 for row in summary.rows()) == summary.macs
    for row in rows:
        if row.kind == "module":
            assert row.macs == sum(each.macs or 0 for each in row.below) and len(row.below) > 1
            assert all(each.name.startswith(row.name) for each in row.below)


SWIN = "swin_tiny_patch4_window7_224"


@pytest.mark.parametrize("name", some_long([*MODELS, SWIN], SWIN, "vit_tiny_patch16_224"))
def test_sizes_of_gates_are_those_of_the_modules(name: str) -> None:
    model = rewritten(name)
    summary = summarize(model)
    inserted = {path: parameter for path, parameter in model.named_parameters() if path.startswith("frac.")}
    assert summary.gate_parameters == sum(parameter.numel() for parameter in inserted.values())
    assert summary.parameters == sum(parameter.numel() for parameter in model.restore().parameters())
    controller = model.get_submodule("frac.controller")
    gates: Any = model.get_submodule("frac.gates").children()
    for gate, size in zip(gates, summary.gates.values(), strict=True):
        entry = [*[1] * gate.feature_axis, gate.hidden.in_features]
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            controller(gate(torch.zeros(entry)), None, True)
        assert size.macs == counter.get_total_flops() // 2


def test_a_plan_shows_what_inspecting_shows() -> None:
    case = build("resnet18")
    dry = plan(case.model, example_inputs=case.args)
    wet = summarize(build_rewritten(case, check=True))
    assert str(dry) == str(wet)


def test_the_text_names_precision_skip_and_reasons() -> None:
    pins = (Pin("depthwise", Precision(8, 16)),)
    text = str(summarize(build_rewritten(build("mobilenetv2_100"), config=paper(pins=pins))))
    for words in ("gated: 7 options", "cannot skip", "rule 'depthwise'", "first contraction", "gates add", "└── "):
        assert words in text
    text = str(summarize(rewritten("resnet18", method="pfq"), ops=True))
    assert "scheduled: 4 stages" in text and "downsample.0 (conv)" in text and "gate" not in text
    assert "on the skip path" in str(summarize(rewritten("resnet18"), ops=True))


def test_the_text_names_the_bits_of_scales() -> None:
    text = str(summarize(rewritten("resnet18", method="static", format="nvfp4", precision=Precision(4, 4))))
    assert "format nvfp4: scales take 8 bits for 16 values, which costs leave out" in text


def test_json_keeps_its_keys_and_has_shares_and_gates_of_blocks() -> None:
    summary = summarize(rewritten("resnet18"))
    plain = json.loads(json.dumps(summary.to_dict()))
    assert {"model", "method", "options", "macs", "blocks", "ops", "leaves", "targets", "reachable"} <= plain.keys()
    assert {"parameters", "gate_parameters", "notes", "shares"} <= plain.keys()
    assert sum(block["share"] for block in plain["blocks"]) == pytest.approx(1)
    gated = [block for block in plain["blocks"] if block["gated"]]
    assert gated and all(set(block["gate"]) == {"parameters", "macs"} for block in gated)
    assert all(op["precision"]["reason"] for op in plain["ops"])


def test_notebook_html_is_well_formed_escaped_and_complete() -> None:
    summary = replace(summarize(rewritten("vit_tiny_patch16_224"), ops=True), model="<script>&", notes=("a < b",))
    html = summary._repr_html_()
    page = ElementTree.fromstring(html)  # raises on anything left unescaped
    assert page.find(".//script") is None
    assert page.findtext(".//caption") == "<script>&, method fractrain"
    assert [row.findtext("th") for row in page.findall(".//tbody/tr")] == [row.name for row in walk(summary)]
    assert page.findall(".//li")[-1].text == "a < b"


@pytest.mark.parametrize(("columns", "gates"), [("80", False), ("140", True)])
def test_the_table_fits_the_columns_and_leaves_out_the_gates_own_in_few(
    columns: str, gates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    model = timm.create_model("resnet10t", num_classes=10)
    text = str(plan(model, config=paper(), example_inputs=(torch.randn(2, 3, 32, 32),)))
    table = text.split("forward MACs")[0]
    assert max(len(line.rstrip()) for line in table.splitlines()) <= int(columns)
    assert ("params" in table) == gates and "layer4.0" in table and "cannot" in table
    assert "forward MACs a sample (x Nx3x32x32)" in " ".join(text.split())


class Timed(nn.Module):
    """A residual block with a second input, and attention that takes the sequence first."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.time, self.inner = nn.Linear(8, 16), nn.Linear(16, 16)
        self.attention = nn.MultiheadAttention(16, 2)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.inner(x + self.time(time))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(x)


def timed(axis: int) -> tuple[nn.Module, dict[str, Any]]:
    inputs = tuple(torch.randn(shape).transpose(0, axis) for shape in ((3, 5, 16), (3, 1, 8)))
    return Timed(), {"config": FracConfig(run=RunConfig(batch_axis=axis)), "example_inputs": inputs}


def test_shapes_are_shown_on_request_with_every_input_of_a_block() -> None:
    model, arguments = timed(1)
    wet = fractrainify(model, **arguments)
    summary = summarize(wet, shapes=True)
    text = str(summary)
    assert "5xNx16, time 1xNx16 -> 5xNx16" in text and "Nx5x16" not in text
    assert "-> 5xNx16" not in str(summarize(wet)) and summary.shapes == plan(model, **arguments).shapes
    assert "5xNx16 -> 5xNx16" in str(summarize(wet, ops=True, shapes=True))
    assert json.loads(json.dumps(summary.to_dict()))["shapes"] == summary.shapes
    assert "<br/>5xNx16" in summary._repr_html_()


def test_much_float_dear_gates_and_uncounted_ops_are_said_first() -> None:
    model, arguments = timed(1)
    summary = plan(model, **arguments)
    assert re.match(
        r"ATTENTION: ops that stay float take \d+ % of the cost .*; gates cost \d+\.\d % of the", summary.loud
    )
    assert " ".join(str(summary).split()).startswith(summary.loud)
    assert f"<strong>{escape(summary.loud)}</strong>" in summary._repr_html_()
    assert plan(model, **arguments | {"config": FracConfig(method="float", run=RunConfig(batch_axis=1))}).loud == ""
    unknown = replace(summary.ops[0], name="odd", macs=None)
    assert "1 contraction is not counted in any share (odd)" in loud_line([unknown], 0, (), 0.0)


@pytest.mark.parametrize(("method", "words"), [("static", "of a step"), ("pfq", "in the last stage")])
def test_the_cost_of_float_ops_is_theirs_of_what_a_step_costs(method: str, words: str) -> None:
    images = torch.randn(2, 3, 64, 64)
    model = build_rewritten(timm.create_model("resnet18", num_classes=10), images, method=method)
    model.set_precision(model.frac_config.precision_stages[-1])
    model.train()(images)
    macs = {
        mode: sum(sum(op.training_macs) for op in model.ops if op.precision.mode == mode)
        for mode in ("float", "scheduled")
    }
    summary = summarize(model)
    assert summary.float_cost == pytest.approx(
        macs["float"] / sum(macs.values()) / model.cost.cp_total.item(), rel=1e-5
    )
    assert f"ops that stay float take {100 * summary.float_cost:.1f} % of the cost {words}" in str(summary)
    assert summary.float_cost < 0.5 and not summary.loud


def test_gradients_in_the_bits_they_need_are_said_to_cost_less() -> None:
    words = "each sample's gradient takes the bits that it needs: a step costs less than is said here"
    for bits, told in (("needed", True), ("given", False)):
        affine = AffineConfig(gradient_bits=bits)  # type: ignore[arg-type]
        assert (words in str(summarize(rewritten("resnet18", config=FracConfig(method="pfq", affine=affine))))) == told


def test_the_cost_of_float_ops_under_gates_is_at_the_last_target() -> None:
    first, last = (summarize(rewritten("resnet18", targets=targets)).float_cost for targets in ((3.0,), (2.0, 3.5)))
    assert last / (1 - last) == pytest.approx(first / (1 - first) * 3.0 / 3.5, rel=1e-6)


@pytest.mark.parametrize("method", ["float", "static"])
def test_a_recurrent_layer_that_gets_the_samples_first_is_named_also_with_rounded_weights(method: Method) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.lstm, self.last = nn.Linear(4, 4), nn.LSTM(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(self.last(self.lstm(self.first(x))[0]))

    with pytest.warns(FracTrainWarning, match="lstm takes sequence-first inputs"):
        fractrainify(Recurrent(), config=FracConfig(method=method), example_inputs=(torch.randn(5, 3, 4),))


def test_sequence_first_parts_that_get_the_samples_first_are_named() -> None:
    model, arguments = timed(0)
    with pytest.warns(FracTrainWarning, match=r"attention takes sequence-first inputs .*batch_axis=1"):
        fractrainify(model, **arguments)
    assert plan(model, **arguments).loud.startswith("ATTENTION: attention takes sequence-first inputs")
    right, arguments = timed(1)
    assert "sequence-first" not in plan(right, **arguments).loud


def test_blocks_keep_their_ends_where_the_shown_graph_has_fused_ops() -> None:
    net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    shown = {}
    formats: list[dict[str, Any]] = [{}, {"format": "mx"}]
    for words in formats:
        model = build_rewritten(net, torch.randn(2, 8), method="static", **words)
        shown[str(words)] = [(block.name, block.ops) for block in model.blocks]
        assert str(summarize(model))
    affine, mx = shown.values()
    assert affine == mx and len(mx) > 1


@pytest.mark.parametrize(
    ("value", "short", "plain"),
    [(0, "0", "0"), (118_013_952, "118 M", "118013952"), (1.5e9, "1.50 G", "1500000000"), (0.0123, "0.0123", "0.0123")],
)
def test_numbers_have_three_digits_and_no_exponent(value: float, short: str, plain: str) -> None:
    assert short_number(value) == short and plain_number(value) == plain


@pytest.mark.parametrize(
    ("seconds", "unit"),
    [
        ((51.63, 0.02), "s"),
        ((0.5, 1.9), "ms"),
        ((36000.0, 40.0), "h"),
        ((36000.0, 2.4), "min"),
        ((3600.0, 1e-3), "s"),
        ((2e5,), "d"),
        ((), "ms"),
        ((0.0,), "ms"),
    ],
)
def test_a_column_of_times_has_the_unit_of_its_longest(seconds: tuple[float, ...], unit: str) -> None:
    assert time_unit(seconds)[0] == unit


def test_an_op_is_named_without_the_modules_of_its_block() -> None:
    assert within_block("layers.0.one", "layers.0") == "one"
    assert within_block("layers.0.two", "layers.0_1") == "two"  # the second block of the module
    assert within_block("layers.0.attention.query", "layers.0.output") == "attention.query"
    assert within_block("head", "head") == "head"
