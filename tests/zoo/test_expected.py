"""The paper's costs, computed: MACs of every static row, energy and latency ratios of table 3."""

from __future__ import annotations

import pytest

from fractrain_fx.config import COMPACT_OPTIONS, DFQ_OPTIONS
from fractrain_fx.config.precision import FULL, SKIP, Precision
from fractrain_fx.errors import ConfigError
from fractrain_fx.training.settings import RunSettings
from fractrain_fx.zoo.comparison import compare
from fractrain_fx.zoo.edge import edge_rows
from fractrain_fx.zoo.expected import expected, mix_of, training_samples
from fractrain_fx.zoo.recipe import load_recipe, load_recipes
from tests.models import some_long

# ALGORITHM 7, in millions a sample; a sample of text has 256 tokens.
FORWARD_MACS = {
    "zoo:resnet38": 83.28,
    "zoo:resnet74": 168.22,
    "zoo:resnet110": 253.15,
    "zoo:resnet164": 247.65,
    "zoo:mobilenetv2": 91.15,
    "timm:resnet18": 1814.07,
    "timm:resnet34": 3663.76,
    "zoo:transformer_base": 18.87 * 256,
}
IMAGES = {"cifar10": 64_000 * 128, "cifar100": 64_000 * 128, "imagenet": 90 * 1_281_167, "wikitext103": 50_000 * 4}
STATIC = [recipe for recipe in load_recipes() if recipe.values["method"] == "static"]


def share(precision: Precision) -> float:
    """Of full-precision training: FW b w, EB g w, GC b g over 32 x 32 bits, with w = b."""
    b, g = precision.fw, precision.bw
    return (b * b + 2 * b * g) / (3 * 32 * 32)


# Deeper models of the same blocks are slow: they show little more.
DEEPER = ("zoo:resnet74", "zoo:resnet110", "timm:resnet34")


@pytest.mark.parametrize("model", some_long(FORWARD_MACS, "zoo:resnet164", "zoo:transformer_base", slow=DEEPER))
def test_macs_of_static_rows_are_m_times_3_times_share_times_images(model: str) -> None:
    recipes = [recipe for recipe in STATIC if recipe.values["model"] == model]
    assert recipes
    for recipe in recipes:
        # Half a per cent: the table's M are rounded, and the first layer has no error product.
        assert expected(recipe.settings).macs == pytest.approx(by_hand(recipe.settings), rel=0.005), recipe.name


def by_hand(settings: RunSettings) -> float:
    of_all = share(settings.frac.precision)
    if settings.frac.pins:
        # Depthwise convolutions at FW-8/BW-16, by hand: 9 MACs at each position of each expanded channel.
        blocks = [(32, 1, 32), (16, 1, 96), (24, 1, 144), (24, 2, 144), (32, 2, 192), (32, 2, 192), (32, 4, 192)]
        blocks += [(64, 4, 384)] * 4 + [(96, 4, 576)] * 2 + [(96, 8, 576)] + [(160, 8, 960)] * 3
        depthwise = sum(9 * (32 // stride) ** 2 * width for _, stride, width in blocks) / 91.15e6
        of_all = (1 - depthwise) * of_all + depthwise * share(Precision(8, 16))
    return FORWARD_MACS[settings.model] * 1e6 * 3 * of_all * IMAGES[settings.data]


@pytest.mark.parametrize("model", ["zoo:resnet38", "zoo:resnet74"])
def test_ratios_of_table_3_to_sbm_are_the_papers_when_the_mix_averages_the_stated_cp(model: str) -> None:
    rows = [row for row in compare("3") if row.recipe.values["model"] == model and row.recipe.settings.frac.gated]
    assert len(rows) == 4
    for row in rows:
        for name in ("energy_kj", "latency_min"):
            ratios = row.ratios(name)
            assert ratios is not None
            paper, ours = ratios
            assert ours == pytest.approx(paper, rel=0.08), (row.recipe.name, name)
        targets = row.recipe.settings.frac.targets
        assert targets is not None
        # 0.1 %: the first layer has no error product, so its share is another.
        assert 100 * row.expected.cp == pytest.approx(sum(targets.per_cent) / len(targets.per_cent), rel=1e-3)


def test_a_mix_is_of_the_options_that_enclose_the_target() -> None:
    assert [str(option) for _, option in mix_of(3.0, DFQ_OPTIONS, 4)] == ["FW-4/BW-6", "FW-6/BW-8"]
    assert [str(option) for _, option in mix_of(1.5, DFQ_OPTIONS, 4)] == ["FW-2/BW-6", "FW-3/BW-6"]
    # Only the options of 12 bits, which take two passes, cost as much.
    assert [str(option) for _, option in mix_of(4.0, DFQ_OPTIONS, 4)] == ["FW-4/BW-12", "FW-6/BW-12"]
    assert mix_of(25.0, (SKIP, FULL), 32) == [(0.75, SKIP), (0.25, FULL)]
    with pytest.raises(ConfigError, match="costs 5 %"):
        mix_of(5.0, DFQ_OPTIONS, 4)
    assert mix_of(6.25, COMPACT_OPTIONS, 8)[1][1] == Precision(8, 8)


def test_progressive_runs_are_computed_with_stages_of_equal_length() -> None:
    recipe = load_recipe("table5-adaptation-pfq")
    mean = sum(share(stage) for stage in recipe.settings.frac.stages.stages) / 4
    assert expected(recipe.settings).cp == pytest.approx(mean, rel=2e-3)
    cyclic = dict(recipe.values) | {"schedule": {"kind": "cyclic", "cycles": 2}, "epochs": 12, "iterations": None}
    # half a cosine over six epochs, in whole bits
    epochs = [share(Precision(*bits)) for bits in ((3, 6), (3, 6), (5, 7), (6, 7), (8, 8), (8, 8))]
    assert expected(RunSettings.from_dict(cyclic)).cp == pytest.approx(sum(epochs) / 6, rel=2e-3)


def test_the_number_of_samples_is_that_of_the_loop() -> None:
    assert training_samples(load_recipe("table3-resnet38-cifar10-sbm").settings) == 8_192_000
    # whole batches only: 5,004 of 256 in each of 90 epochs
    imagenet = load_recipe("table4-resnet18-imagenet-sbm")
    assert training_samples(imagenet.settings) == 90 * 5_004 * 256
    assert training_samples(RunSettings.from_dict(dict(imagenet.values) | {"epoch_steps": 100})) == 90 * 100 * 256
    # Half a pass, but 50 epochs for the indicator.
    text = load_recipe("table2-transformer-wikitext103-pfq").settings.train
    assert (text.iterations, text.epoch_steps) == (50_000, 1_000)


def test_what_cannot_be_computed_says_why() -> None:
    with pytest.raises(ConfigError, match="digits"):
        expected(RunSettings())
    values = dict(load_recipe("table3-resnet38-cifar10-dfq").values)
    with pytest.raises(ConfigError, match="targets"):
        expected(RunSettings.from_dict(values | {"targets": None}))


def test_the_zc706_saves_the_latency_that_the_paper_prints() -> None:
    rows = edge_rows()
    assert [(row.model, row.paper) for row in rows] == [("ResNet-38", 34.9), ("ResNet-74", 36.6)]
    for row in rows:
        assert row.computed == pytest.approx(row.paper, rel=0.1), row
        assert row.a_sample == pytest.approx(39.5, abs=0.1)  # the printed MACs pay for 7 and 8 % more samples
