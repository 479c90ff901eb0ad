"""Sensitivities: the noise of rounded gradients, what can be measured, and how it is shown."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fractrain_fx
from fractrain_fx import AffineConfig, FracConfig, Pin, Precision, fractrainify, sensitivity
from fractrain_fx.errors import ConfigError, InputError, ModelError, RunError
from fractrain_fx.execution.plan import Call, Plan, Rounds
from fractrain_fx.execution.rounded import FIRST, SECOND
from fractrain_fx.execution.roundings import forward_roundings, gradient_roundings
from fractrain_fx.numerics.sensitivity import Sensitivities
from fractrain_fx.numerics.sensitivity.float_copy import FloatCopy
from fractrain_fx.numerics.sensitivity.rounded import OperandName, factor_error, gradient_errors
from fractrain_fx.zoo.formats import FORMAT_RECIPES
from tests.models import thinned
from tests.numerics.trained import Trained, conv_net, gpt2


@pytest.fixture(scope="module")
def net() -> Trained:
    return conv_net()


@pytest.fixture(scope="module")
def found(net: Trained) -> Sensitivities:
    return sensitivity(net.model, net.batches[:4], criterion=net.criterion)


@pytest.mark.long
def test_the_variance_of_a_gradient_is_that_of_many_roundings(net: Trained) -> None:
    found = sensitivity(net.model, net.batches[:4], criterion=net.criterion, precisions=[3])
    name = found.measured[-1].name
    copied = FloatCopy(net.model, net.batches[0], net.criterion, None)
    exact = [copied.gradients(batch)[copied.weights[name]] for batch in net.batches[:4]]

    def rounded(seed: int, plan: Plan, call: Call, g: Tensor) -> tuple[Tensor, Tensor]:
        errors = gradient_errors(plan, call, g, 3, torch.tensor(seed))
        return g + errors.by_second, g + errors.by_first

    squares = []
    for seed in range(20):
        copied.probes[name].on_backward = partial(rounded, seed)
        for batch, each in zip(net.batches[:4], exact, strict=True):
            squares.append(float((copied.gradients(batch)[copied.weights[name]] - each).square().sum()))
    copied.release()
    row = found.of(name, "g", 3)
    assert row.variance == pytest.approx(sum(squares) / len(squares), rel=0.2), "one rounding of four batches"
    assert row.batch_variance == pytest.approx(float(torch.stack(exact).var(0).sum()), rel=1e-3)


def test_the_error_of_a_transformed_gradient_is_that_of_the_gradient_itself() -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    batch = torch.randn(24, 6), torch.randint(3, (24,))  # not a multiple of a block
    config = FracConfig(method="static", format="nvfp4", precision="FW-4/BW-4")
    copied = FloatCopy(model, batch, F.cross_entropy, config)
    (op,) = copied.probes
    seed, checked = torch.tensor(5), []

    def compared(plan: Plan, call: Call, g: Tensor) -> tuple[Tensor, Tensor]:
        bits = torch.tensor(4, dtype=torch.int32)
        of_g, x = gradient_roundings(plan, call._replace(bits=bits, seed=seed), g, FIRST, seed)
        assert of_g is not None and of_g.values.shape != g.shape, "transformed, and filled up with zeros"
        wanted = (of_g.rounded() - of_g.values).t() @ x.values
        torch.testing.assert_close(gradient_errors(plan, call, g, 4, seed).by_first.t() @ call.a, wanted)
        checked.append(op)
        return g, g

    copied.probes[op].on_backward = compared
    copied.gradients(batch)
    assert checked == [op]


def test_the_error_of_a_transformed_factor_is_that_of_the_factor_itself() -> None:
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 3))
    batch = torch.randn(8, 6), torch.randint(3, (8,))
    copied = FloatCopy(model, batch, F.cross_entropy, FracConfig(method="static", format="int", recipe="halo"))
    (probe,), checked = copied.probes.values(), []

    def compared(plan: Plan, call: Call) -> tuple[Tensor, Tensor]:
        eight = Rounds(torch.tensor(8, dtype=torch.int32), None)
        a, b = (each.rounded() for each in forward_roundings(plan, call._replace(of_a=eight, of_b=eight)))
        errors = factor_error(plan, call, FIRST, 8), factor_error(plan, call, SECOND, 8)
        assert a.shape != call.a.shape, "filled up with zeros"
        product = (call.a + errors[0]) @ (call.b + errors[1]).t()
        # Both errors together lose a little in what was filled up.
        torch.testing.assert_close(product, a @ b.t(), atol=1e-4, rtol=0)
        checked.append(plan)
        return call.a, call.b

    probe.on_forward = compared
    copied.loss(batch)
    assert checked


@pytest.mark.parametrize("recipe", ["quartet-ii", "tetrajet-v2", "halo"])
def test_recipes_with_any_transform_are_measured(recipe: str) -> None:
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
    batches = [(torch.randn(32, 6), torch.randint(3, (32,))) for _ in range(4)]
    chosen = FORMAT_RECIPES[recipe]
    config = FracConfig(method="static", format=chosen.recipe.format, recipe=recipe, precision=chosen.precision)
    found = sensitivity(model, batches, criterion=F.cross_entropy, config=config, precisions=[chosen.precision.fw])
    assert [(row.operand, (row.change or row.noise or 0) > 0) for row in found.rows] == [(o, True) for o in "xwg"]


def test_the_model_stays_as_it_is(net: Trained) -> None:
    before = {name: each.clone() for name, each in net.model.state_dict().items()}
    net.model.eval()
    state = torch.get_rng_state()
    sensitivity(net.model, net.batches[:4], criterion=net.criterion, precisions=[4])
    assert not net.model.training
    assert all(torch.equal(each, before[name]) for name, each in net.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(each.grad is None for each in net.model.parameters())


@pytest.mark.parametrize(
    "config",
    thinned(
        [
            FracConfig(method="fractrain"),
            FracConfig(method="pfq"),
            FracConfig(method="float"),
            FracConfig(method="static", affine=AffineConfig(ranges="row")),
            FracConfig(method="static", format="mx"),
            FracConfig(method="static", format="nvfp4", precision="FW-4/BW-4"),
            FracConfig(method="static", format="dorefa", pins=[Pin("3", format="mx", precision="FW-8/BW-8")]),
        ],
        2,
    ),
    ids=lambda config: f"{config.method}-{config.format}-{config.affine.ranges}",
)
def test_rewritten_models_of_any_method_and_format(net: Trained, config: FracConfig) -> None:
    model = fractrainify(net.model, config=config, example_inputs=(net.batches[0][0],))
    found = sensitivity(model, net.batches[:4], criterion=net.criterion)
    assert len(found.measured) == 3, "all but the first convolution and the last layer"
    for op in found.measured:
        names: dict[OperandName, str] = {"x": "change", "w": "change", "g": "noise"}
        for operand, name in names.items():
            values = [getattr(found.of(op.name, operand, bits), name) for bits in found.widths(op.name)]
            assert min(values) > 0
            if op.format != "dorefa":  # which bends values at any width
                assert values[0] == max(values), "fewer bits harm more"
            if op.format == "affine":  # 6 and 8 bits of mx have as long a mantissa
                assert values == sorted(values, reverse=True)
        assert found.widths(op.name) == {"mx": (4, 6, 8), "nvfp4": (4,)}.get(op.format, tuple(range(2, 9)))


def test_a_models_own_loss() -> None:
    model, batches, _ = gpt2(steps=5)
    found = sensitivity(model, batches[:4], precisions=[4])
    assert found.loss == pytest.approx(model(**batches[0]).loss.item(), rel=0.2)
    assert {row.op for row in found.rows if row.operand == "w"} == {op.name for op in found.measured}


def test_it_is_written_and_read(found: Sensitivities, tmp_path: Path) -> None:
    found.to_json(tmp_path / "net.json")
    assert Sensitivities.from_json(tmp_path / "net.json") == found
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(RunError, match="does not hold sensitivities"):
        Sensitivities.from_json(tmp_path / "other.json")
    with pytest.raises(RunError, match="cannot be read"):
        Sensitivities.from_json(tmp_path / "missing.json")


def test_the_table_fits_80_columns(found: Sensitivities) -> None:
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    assert all(any(line.strip().startswith(op.name) for line in lines) for op in found.measured)


def test_the_heat_map_has_a_cell_for_each_row(found: Sensitivities, tmp_path: Path) -> None:
    found.to_svg(tmp_path / "net.svg")
    root = ElementTree.parse(tmp_path / "net.svg").getroot()
    cells = root.findall("{http://www.w3.org/2000/svg}rect")
    assert len(cells) == len(found.rows)
    shades = {str(cell.findtext("{http://www.w3.org/2000/svg}title")): str(cell.get("fill")) for cell in cells}
    dark, light = (
        int(re.findall(r"\d+", shades[next(t for t in shades if t.startswith(f"3, weights at {bits} bits"))])[1])
        for bits in (2, 8)
    )
    assert dark < light
    with pytest.raises(InputError, match=r"write .*net\.svg"):
        found.to_svg(tmp_path / "net.png")


def test_costs_are_those_of_the_ledger(net: Trained, found: Sensitivities) -> None:
    model = fractrainify(
        net.model, config=FracConfig(method="static", precision="FW-4/BW-6"), example_inputs=(net.batches[0][0],)
    )
    model.train()(net.batches[0][0])
    assert found.cost("FW-4/BW-6") == pytest.approx(100 * float(model.cost.cp_total), rel=1e-5)
    with pytest.raises(ConfigError, match="no precision for"):
        found.cost({})


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"limit": 3}, InputError, "3 batches do not show"),
        ({"criterion": None}, InputError, "too many positional arguments"),
        ({"precisions": []}, ConfigError, "precisions is empty"),
        ({"precisions": [1]}, ConfigError, "a width is 2 to 16 bits"),
        ({"precisions": [5], "config": FracConfig(method="static", format="mx")}, ConfigError, "lacks"),
        (
            {"config": FracConfig(method="static", format="mx", recipe="mxfp8-nvfp4", precision="8/4")},
            ConfigError,
            "measures all products of an op in one number format",
        ),
    ],
)
def test_mistakes_are_named(net: Trained, arguments: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        sensitivity(net.model, net.batches, **{"criterion": net.criterion, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [{"x": torch.zeros(2, 4)}, torch.zeros(2, 4), (torch.zeros(2, 4),)])
def test_a_batch_without_targets_for_the_criterion_is_named(batch: object) -> None:
    with pytest.raises(InputError, match=rf"a batch must be \(inputs, targets\), not a {type(batch).__name__}"):
        sensitivity(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), [batch] * 4, criterion=F.cross_entropy)


def test_a_config_for_a_rewritten_model_is_refused(net: Trained) -> None:
    model = fractrainify(net.model, config=FracConfig(method="static"), example_inputs=(net.batches[0][0],))
    with pytest.raises(ConfigError, match="leave it out"):
        sensitivity(model, net.batches, criterion=net.criterion, config=FracConfig())


def test_a_model_with_nothing_to_round(net: Trained) -> None:
    batches = [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(4)]
    with pytest.raises(ModelError, match="finds nothing to quantize"):
        sensitivity(nn.Linear(4, 2), batches, criterion=F.cross_entropy)


def test_a_width_that_was_not_measured(found: Sensitivities) -> None:
    name = found.measured[0].name
    with pytest.raises(ConfigError, match=r"not measured at 12 bits: write precisions=\[\.\.\., 12\]"):
        found.harm(name, Precision(12, 8), 1.0)


def test_the_names_are_known_without_being_imported() -> None:
    assert "sensitivity" in fractrain_fx.__all__
    with pytest.raises(AttributeError, match="no attribute 'sensitivities'"):
        fractrain_fx.sensitivities  # noqa: B018


def test_parts_that_stay_in_eval_mode_while_a_model_trains_stay_so_in_its_copy() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 4)).train()
    net[1].eval()
    copied = FloatCopy(net, (torch.randn(6, 4), None), lambda outputs, batch: outputs.square().mean(), None)
    assert copied.original.training and not copied.original[1].training  # type: ignore[index]
    assert copied.model.training and not net[1].training


def test_a_model_in_eval_mode_is_measured_as_it_trains() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 4)).eval()
    copied = FloatCopy(net, (torch.randn(6, 4), None), lambda outputs, batch: outputs.square().mean(), None)
    assert copied.model.training and copied.original[1].training and not net.training  # type: ignore[index]
