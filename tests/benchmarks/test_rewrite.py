"""Models too large for this machine: planned and rewritten in little time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
import timm
import torch
import transformers
from torch.fx.graph import _node_list

from benchmarks.rewrite import without_data
from fractrain_fx import fractrainify, plan


def measured(layers: int) -> dict[str, float]:
    run = [sys.executable, "-m", "benchmarks.rewrite", "--layers", str(layers)]
    found: dict[str, float] = json.loads(subprocess.run(run, capture_output=True, text=True, check=True).stdout)
    return found


@pytest.mark.slow
def test_llama_7b_is_rewritten_within_a_minute_and_four_gibibytes_and_cost_grows_with_the_nodes() -> None:
    half, whole, twice = (measured(layers) for layers in (16, 32, 64))
    assert whole["parameters"] > 6.7e9
    assert whole["plan_s"] + whole["rewrite_s"] < 60
    assert whole["peak_gib"] < 4
    # Four times the nodes; a cost that grew with their square would be four times as high for each.
    assert twice["rewrite_s"] / twice["nodes"] < 2 * half["rewrite_s"] / half["nodes"]


def test_two_layers_of_llama_7b_are_planned_without_data() -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=2))
    table = plan(model)
    length, width, inner, vocabulary = 16, 4096, 11008, 32000
    layer = length * (4 * width * width + 3 * width * inner) + 2 * length * length * width
    assert table.macs == 2 * layer + length * width * vocabulary
    assert [block.skip for block in table.blocks] == ["identity"] * 4 + [None]
    assert "not compared" in str(table)


@pytest.mark.long
def test_the_measurement_counts_nodes_in_proportion_to_layers() -> None:
    one, two, three = (without_data(layers, width=256)["nodes"] for layers in (1, 2, 3))
    assert three - two == two - one > 50


def test_no_pass_walks_over_the_graph_for_each_of_its_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    real, walks = _node_list.__iter__, []

    def counted(nodes: _node_list) -> Iterator[torch.fx.Node]:
        walks.append(nodes)
        return real(nodes)

    monkeypatch.setattr(_node_list, "__iter__", counted)
    counts = []
    for depth in (1, 3):
        walks.clear()
        with torch.device("meta"):
            model = timm.create_model("vit_tiny_patch16_224", depth=depth)
        fractrainify(model, check=False)
        counts.append(len(walks))
    assert counts[0] == counts[1] > 0
