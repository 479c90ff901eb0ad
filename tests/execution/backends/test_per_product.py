"""Six operands for three products: against plain references, in every family of products, under gates and compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from html import unescape
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.nn.grad import conv2d_input, conv2d_weight

from fractrain_fx import (
    AffineConfig,
    CostTargets,
    Engine,
    FracModel,
    GateConfig,
    Pin,
    Precision,
    summarize,
)
from fractrain_fx.config import RECIPES, GateGradient, OperandRecipe, ProductRecipe, Recipe
from fractrain_fx.drawing import draw
from fractrain_fx.execution.fused_op import FusedOp
from fractrain_fx.formats import Operand, get_format
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.formats.bits import unrounded
from fractrain_fx.formats.microscaling import fake_quantize
from fractrain_fx.passes import facts, fused_ops
from tests import build
from tests.everything import Everything
from tests.residual import Residual

Step = Callable[[Tensor], Tensor]
mx8 = partial(fake_quantize, element="e4m3")


class Between(nn.Module):
    """A function between two layers of a model, which stay float as the first and the last contraction."""

    def __init__(self, between: Callable[..., Tensor], width: int, *shape: int) -> None:
        super().__init__()
        self.between, self.stem, self.head = between, nn.Linear(width, width), nn.Linear(1, 1)
        self.weight = nn.Parameter(torch.randn(*shape) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self.stem(x), self.weight).mean().view(1, 1))


def rewritten(net: nn.Module, x: Tensor, **words: Any) -> FracModel:
    return build.rewritten(net, x, **{"method": "static", "format": "mx", **words}).train()


def op_of(between: Callable[..., Tensor], x: Tensor, *shape: int, **words: Any) -> FusedOp:
    """The fused op of a function of an activation and a weight."""
    model = rewritten(Between(between, x.shape[-1], *shape), x, **words)
    model(x)
    (op,) = fused_ops(model.graph_module).values()
    return op


def gradients(op: FusedOp, x: Tensor, w: Tensor, g: Tensor, bits: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Output and both gradients of a fused op."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    width, unused = torch.tensor(bits), get_format("mx").activation_range(x)
    ranges = (None if op.plan.first.weight else unused, None if op.plan.second.weight else unused)
    out = op((width, width, width), None, ranges, torch.tensor(5), x, w, None)
    return (out.detach(), *torch.autograd.grad(out, (x, w), g))


def test_linear() -> None:
    x, w, g = torch.randn(6, 7, 40), torch.randn(48, 40), torch.randn(6, 7, 48)
    out, of_x, of_w = gradients(op_of(F.linear, x, 48, 40, recipe="mxfp8"), x, w, g)
    assert torch.equal(out, F.linear(mx8(x), mx8(w)))
    assert torch.equal(of_x, (mx8(g).flatten(0, 1) @ mx8(w, axis=0)).view_as(x))
    rows = partial(mx8, axis=0)  # blocks run over positions and samples
    assert torch.equal(of_w, rows(g.flatten(0, 1)).t() @ rows(x.flatten(0, 1)))


def test_each_product_may_have_a_format_of_its_own() -> None:
    recipe = Recipe("mx", input_gradient=ProductRecipe(format="nvfp4"), weight_gradient=ProductRecipe(format="int"))
    x, w, g = torch.randn(24, 40), torch.randn(48, 40), torch.randn(24, 48)
    out, of_x, of_w = gradients(op_of(F.linear, x, 48, 40, recipe=recipe, precision="4/4"), x, w, g, bits=4)
    mx4 = partial(fake_quantize, element="e2m1")
    nvfp4 = partial(fake_quantize, element="e2m1", block=16, scale="e4m3")
    int4 = partial(fake_quantize, element="int4", block=None, scale="float32")
    assert torch.equal(out, F.linear(mx4(x), mx4(w)))
    assert torch.equal(of_x, nvfp4(g) @ nvfp4(w, axis=0))
    assert torch.equal(of_w, int4(g).t() @ int4(x))


def test_convolution() -> None:
    conv = partial(F.conv2d, stride=2, padding=1)
    x, w, g = torch.randn(3, 40, 6, 6), torch.randn(36, 40, 3, 3), torch.randn(3, 36, 3, 3)

    def over_positions(x: Tensor) -> Tensor:
        flat = x.transpose(0, 1).flatten(1)
        return mx8(flat).view(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1)

    op = op_of(lambda x, w: F.conv2d(x, w, None, 2, 1), x, 36, 40, 3, 3, recipe="mxfp8")
    out, of_x, of_w = gradients(op, x, w, g)
    assert torch.equal(out, conv(mx8(x, axis=1), mx8(w, axis=1)))
    how: dict[str, Any] = {"stride": 2, "padding": 1}
    assert torch.allclose(of_x, conv2d_input(x.shape, mx8(w, axis=0), mx8(g, axis=1), **how), atol=1e-5)
    plain = conv2d_weight(over_positions(x), w.shape, over_positions(g), **how)
    assert torch.allclose(of_w, plain, atol=1e-4)


def test_depthwise_kernels_have_a_scale_for_each_window() -> None:
    x, w = torch.randn(2, 8, 6, 6), torch.randn(8, 1, 3, 3)
    op = op_of(lambda x, w: F.conv2d(x, w, groups=8), x, 8, 1, 3, 3, pins=(Pin("depthwise", Precision(8, 8)),))
    out, _, _ = gradients(op, x, w, torch.randn(2, 8, 4, 4))
    assert torch.equal(out, F.conv2d(mx8(x, axis=1), mx8(w.flatten(1)).view_as(w), groups=8))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(40, 80), nn.Linear(40, 3)

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.stem(x).chunk(2, -1)
        return self.head(torch.matmul(torch.matmul(query, key.mT), key).mean(1))


def test_the_products_of_attention() -> None:
    x = torch.randn(2, 36, 40)
    model = rewritten(Attention(), x, recipe="mxfp8")
    model(x)
    op, _ = fused_ops(model.graph_module).values()
    a, b, g = torch.randn(2, 36, 40), torch.randn(2, 40, 36), torch.randn(2, 36, 36)
    out, of_a, of_b = gradients(op, a, b, g)
    assert torch.equal(out, mx8(a) @ mx8(b, axis=-2))
    assert torch.equal(of_a, mx8(g) @ mx8(b).mT)
    assert torch.equal(of_b, mx8(a, axis=-2).mT @ mx8(g, axis=-2))


def test_einsum() -> None:
    x, w, g = torch.randn(4, 5, 6), torch.randn(6, 5, 7), torch.randn(4, 7)
    op = op_of(lambda x, w: torch.einsum("bcd,dce->be", x, w), x, 6, 5, 7, recipe="mxfp8")
    out, of_x, of_w = gradients(op, x, w, g)
    rounded = mx8(x.flatten(1)).view_as(x), mx8(w.transpose(0, 1).flatten(0, 1), axis=0).view(5, 6, 7).transpose(0, 1)
    assert torch.allclose(out, torch.einsum("bcd,dce->be", *rounded), atol=1e-5)
    assert torch.allclose(of_x, torch.einsum("be,dce->bcd", mx8(g), mx8(w)), atol=1e-5)
    assert torch.allclose(of_w, torch.einsum("be,bcd->dce", mx8(g, axis=0), mx8(x, axis=0)), atol=1e-5)


def test_a_weight_may_come_first() -> None:
    x, w, g = torch.randn(3, 40, 36), torch.randn(44, 40), torch.randn(3, 44, 36)
    model = rewritten(Between(lambda x, w: torch.matmul(w, x), 36, 44, 40), x, recipe="fp8", format="fp8")
    model(x)
    (op,) = fused_ops(model.graph_module).values()
    out, of_w, of_x = gradients(op, w, x, g)
    fp8 = partial(fake_quantize, block=None, scale="float32")
    error = fp8(g, "e5m2")
    assert torch.equal(out, fp8(w, "e4m3") @ fp8(x, "e4m3"))
    assert torch.allclose(of_w, (error @ fp8(x, "e4m3").mT).sum(0), atol=1e-3)
    assert torch.allclose(of_x, fp8(w, "e4m3").mT @ error, atol=1e-4)


# The least signal-to-noise ratio of any gradient of `Everything`, in dB: a little below what one seed gives.
@pytest.mark.parametrize(
    ("words", "least"),
    [
        ({"precision": "32/32", "recipe": "mxfp4"}, 130),
        ({"precision": "16/16"}, 40),
        ({"precision": "8/8"}, 14),
        ({"precision": "8/8", "recipe": "mxfp4"}, 14),
        ({"precision": "6/6"}, 14),
        ({"precision": "4/4"}, 5),
        ({"precision": "4/4", "format": "nvfp4"}, 5),
        ({"precision": "8/8", "format": "fp8"}, 12),
        ({"precision": "8/8", "format": "int"}, 20),
        ({"precision": "8/8", "format": "affine", "affine": AffineConfig(ranges="row")}, 20),
        ({"precision": "8/8", "format": "affine", "affine": AffineConfig(ranges="head")}, 20),
        ({"precision": "8/8", "format": "int", "recipe": "switchback"}, 20),
        ({"precision": "8/4", "recipe": "mxfp8-nvfp4"}, 5),
        ({"precision": "4/4", "format": "nvfp4", "recipe": "tetrajet-v2"}, 3),
        ({"precision": "4/4", "format": "nvfp4", "recipe": "quartet-ii"}, 3),
        ({"precision": "8/8", "format": "int", "recipe": "halo"}, 20),
    ],
    ids=str,
)
def test_gradients_of_every_family_are_near_those_in_float(words: dict[str, Any], least: float) -> None:
    net, x = Everything(), torch.randn(4, 6, 8)
    model = rewritten(copy.deepcopy(net), x, **words)

    def step(of: nn.Module) -> dict[str, Tensor]:
        torch.manual_seed(3)
        of.zero_grad()
        of(x).square().sum().backward()
        return {name: p.grad.clone() for name, p in of.named_parameters() if p.grad is not None}

    exact, found, again = step(net), step(model), step(model)
    assert exact.keys() == found.keys()
    for name, value in exact.items():
        assert torch.equal(found[name], again[name])  # equal seeds give equal noise
        assert 20 * torch.log10(value.norm() / (found[name] - value).norm()) > least, name


def test_the_transform_leaves_the_product_as_it_is() -> None:
    fmt = get_format("mx", recipe=RECIPES["mxfp4"])
    g, x, seed = torch.randn(37, 5), torch.randn(37, 6), torch.tensor(3)
    x[11] *= 1000
    bits = torch.tensor(4), torch.tensor(4)
    turned = fmt.transform("weight_gradient", g, x, (0, 0), bits, seed)
    assert turned[0].shape == (48, 5) and torch.allclose(turned[0].t() @ turned[1], g.t() @ x, atol=1e-2)
    assert turned[1].abs().max() < 0.5 * x.abs().max()  # the outlier is spread over 16 rows
    other = fmt.transform("weight_gradient", g, x, (0, 0), bits, seed + 1)[0]
    assert not torch.equal(other, turned[0])
    wide = torch.tensor(32), torch.tensor(16)
    assert fmt.transform("weight_gradient", g, x, (0, 0), wide, seed)[0] is g
    assert fmt.transform("input_gradient", g, x, (0, 0), bits, seed)[0] is g


@pytest.mark.long
@pytest.mark.parametrize(
    "recipe", ["tetrajet-v2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("quartet-ii", "halo"))]
)
def test_transforms_of_all_products_compile_and_are_left_out_at_16_bits(recipe: str) -> None:
    bits, format = (8, "int") if recipe == "halo" else (4, "nvfp4")
    x = torch.randn(4, 6, 8)
    net = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 2))
    stages = f"FW({bits},16,32)/BW({bits},16,32)"
    model = rewritten(net, x, method="pfq", format=format, stages=stages, recipe=recipe)
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(model, backend=counter, fullgraph=True)
    outputs = []
    for precision in model.frac_config.precision_stages:
        model.set_precision(precision)
        outputs.append(model(x))
        torch.testing.assert_close(run(x), outputs[-1], rtol=1e-4, atol=1e-4)
        run(x).square().mean().backward()
    assert counter.frame_count == 1
    torch.testing.assert_close(outputs[-1], net(x))


def test_both_products_that_read_a_weight_share_its_square_blocks() -> None:
    fmt, w = get_format("nvfp4", recipe=RECIPES["nvfp4"]), torch.randn(40, 50)
    forward = fmt.operand(w, 4, Operand("forward", "w", (1,), across=(0,), weight=True))
    assert torch.equal(forward, fmt.operand(w, 4, Operand("input_gradient", "w", (0,), across=(1,), weight=True)))
    assert not torch.equal(forward, fmt.operand(w, 4, Operand("forward", "w", (1,), weight=True)))


@pytest.mark.parametrize("name", ["affine", "dorefa", "wageubn"])
def test_other_formats_answer_the_same_for_every_product(name: str) -> None:
    fmt, x, seed = get_format(name), torch.randn(5, 7), torch.tensor(3)
    for product in ("forward", "input_gradient", "weight_gradient"):
        for along in ((0,), (1,)):
            found = fmt.operand(x, 4, Operand(product, "x", along))
            assert torch.equal(found, fmt.activation(x, 4, fmt.activation_range(x)))
            found = fmt.operand(x, 4, Operand(product, "w", along, channel=0, weight=True))
            assert torch.equal(found, fmt.weight(x, 4, dim=0))
            found = fmt.operand(x, 4, Operand(product, "g", along, BatchAxis()), seed=seed)
            assert torch.equal(found, fmt.gradient(x, 4, axis=BatchAxis(), seed=seed))


@pytest.mark.parametrize("name", ["mx", "nvfp4", "fp8", "int"])
def test_samples_have_bits_of_their_own(name: str) -> None:
    fmt, x = get_format(name), torch.randn(6, 40)
    few = 8 if name == "fp8" else 4
    bits = torch.tensor([0, few, 16, 32, few, 16]).view(6, 1)
    for of in (Operand("forward", "x", (1,)), Operand("weight_gradient", "x", (0,))):
        whole = {width: fmt.operand(x, width, of) for width in (few, 16)}
        found = fmt.operand(x, bits, of)
        assert torch.equal(found, unrounded(bits, x, torch.where(bits == few, whole[few], whole[16])))


@pytest.mark.parametrize("gradient", get_args(GateGradient))
def test_gates_get_the_gradient_of_the_forward_rounding(gradient: GateGradient) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 6)
    options = ("FW-0/BW-0", "FW-4/BW-8", "FW-8/BW-8")
    gate = GateConfig(gradient=gradient)
    model = rewritten(Residual(), x, method="dfq", options=options, targets=(4.0,), weight_bits=8, gate=gate)
    model(x)
    (op,) = fused_ops(model.graph_module).values()
    a, w, g = torch.randn(5, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True), torch.randn(5, 8)
    picked = torch.tensor([0, 1, 2, 1, 0])
    choice = F.one_hot(picked, 3).float().requires_grad_()
    unused = get_format("mx").activation_range(a)
    out = op((picked, torch.tensor(8), picked), choice, (unused, None), torch.tensor(5), a, w, None)
    of_a, of_choice = torch.autograd.grad(out, (a, choice), g)
    assert (of_a[[0, 4]] == 0).all() and (of_a[1:4].abs().sum(1) > 0).all()
    for option, element in ((1, "e2m1"), (2, "e4m3")):
        part = of_a * (fake_quantize(a.detach(), element) - a.detach())
        wanted = part.sum(1) if gradient == "straight-through" else 5 / 2 * part.square().sum(1)
        assert torch.allclose(of_choice[:, option], wanted, atol=1e-6)
    assert (of_choice[:, 0] == 0).all()


@pytest.mark.parametrize(
    ("method", "words"), [("dfq", {}), ("fractrain", {"format": "affine", "affine": AffineConfig(ranges="row")})]
)
def test_gated_methods_train(method: str, words: dict[str, Any]) -> None:
    x = torch.randn(6, 6)
    options = ("FW-0/BW-0", "FW-4/BW-8", "FW-6/BW-8", "FW-8/BW-8")
    model = rewritten(
        Residual(), x, method=method, options=options, targets=CostTargets((4.0,), saturate=True), **words
    )
    engine, optimizer = Engine(model), torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(8):
        loss = engine.loss(model(x).square().mean())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2 and 0 < model.cost.cp < 0.0625
    assert all(p.grad is not None for name, p in model.named_parameters() if "gate" in name)


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "stages"), [("mxfp4", "FW(4,4,8,16)/BW(4,8,8,16)"), ("mxfp8-nvfp4", "FW(4,8,8)/BW(4,4,16)")]
)
def test_stages_compile_once_and_give_the_numbers_of_eager_mode(recipe: str, stages: str) -> None:
    x = torch.randn(4, 6, 8)
    net = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 2))
    model = rewritten(net, x, method="pfq", stages=stages, recipe=recipe)
    counter = CompileCounterWithBackend("aot_eager")
    run, engine = torch.compile(model, backend=counter, fullgraph=True), Engine(model)

    def step(of: Step) -> list[Tensor]:
        torch.manual_seed(3)
        model.zero_grad()
        engine.loss(of(x).square().mean()).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for precision in model.frac_config.precision_stages:
        model.set_precision(precision)
        for compiled, eager in zip(step(run), step(model), strict=True):
            # Noise is drawn otherwise in compiled graphs, and sums are taken in another order.
            assert (compiled - eager).norm() < 0.5 * eager.norm()
    assert counter.frame_count == 1


def test_a_product_in_bfloat16_is_counted_as_such() -> None:
    x = torch.randn(4, 6)
    model = rewritten(Residual(), x, format="int", recipe="switchback")
    model(x)
    shares = torch.stack([model.cost.fw, model.cost.eb, model.cost.gc])
    assert torch.equal(shares, torch.tensor([64.0, 64.0, 256.0]) / 1024)


def test_a_format_for_each_product_in_stages(tmp_path: Path) -> None:
    x = torch.randn(4, 6)
    stages, pins = "FW(4,8,8)/BW(4,4,16)", (Pin("last", recipe="mxfp8-nvfp4"),)
    model = rewritten(Residual(), x, method="pfq", stages=stages, recipe="mxfp8-nvfp4", pins=pins)
    costs = []
    for precision in model.frac_config.precision_stages:
        model.set_precision(precision)
        model(x)
        costs.append([1024 * float(each) for each in (model.cost.fw, model.cost.eb, model.cost.gc)])
    assert costs == [[16, 16, 16], [64, 16, 16], [64, 256, 256]]
    text = str(model.graph_module)
    assert "forward: x mx e2m1/e2m3/e4m3, w mx" in text and "input gradient: g nvfp4 e2m1 (stochastic), w nvfp4" in text
    notes = str(summarize(model))
    assert "format mx: scales take" in notes and "format nvfp4: scales take" in notes
    model.save_pretrained(tmp_path)
    assert FracModel.from_pretrained(tmp_path, model=Residual()).frac_config == model.frac_config


def test_the_graph_shown_says_what_each_product_gets() -> None:
    x = torch.randn(4, 6)
    recipe = Recipe("mx", weight_gradient=ProductRecipe(OperandRecipe(stochastic=True, eight="e5m2"), hadamard=16))
    text = str(rewritten(Residual(), x, recipe=recipe).graph_module)
    assert "forward: x mx e2m1/e2m3/e4m3, w mx e2m1/e2m3/e4m3" in text
    assert "input gradient: g mx e2m1/e3m2/e4m3, w mx" in text
    assert "weight gradient: g mx e2m1/e3m2/e5m2 (stochastic), x mx e2m1/e2m3/e4m3, both after a random Hada" in text


def test_ops_that_have_no_form_stay_float_and_say_so() -> None:
    model = rewritten(Everything(), torch.randn(4, 6, 8))
    reasons = {op.name: op.precision.reason for op in model.ops}
    assert reasons["even"] == "format 'mx' has no form for it: pads its two sides differently"
    roles = [facts(node).role for node in model.graph_module.graph.nodes]
    assert roles.count("fused") == 8 and "gradient" not in roles


LAYERS = ("0", "1", "2", "3")


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in LAYERS))


@pytest.mark.parametrize("format", ["affine", "mx"])
def test_a_pin_rounds_its_op_in_its_own_format_at_its_own_cost(format: str, tmp_path: Path) -> None:
    x = torch.randn(8, 64)
    pins = (Pin("2", recipe="mxfp4"), Pin("3", format="bfloat16"), Pin("0", "FW-6/BW-6", format="affine"))
    model = rewritten(deep(), x, format=format, precision="8/8", pins=pins)
    model(x)
    ops = fused_ops(model._state.running[True].current())
    found = {name: (op.plan.fmt.name, op.plan.fmt.per_product) for name, op in ops.items()}
    block = ("mx", True)
    assert found == {"0": ("affine", False), "1": (format, format == "mx"), "2": block, "3": block}
    bits = {"0": 6, "1": 8, "2": 4, "3": 16}
    shares = [(each / 32) ** 2 * (2 / 3 if name == "0" else 1) for name, each in bits.items()]  # no input gradient
    assert float(model.cost.cp_total) == pytest.approx(sum(shares) / (4 - 1 / 3))
    assert [block.name for block in model.blocks] == list(LAYERS)
    table = str(summarize(model, ops=True))
    assert "pinned FW-4/BW-4: rule '2', mxfp4" in table and "rule '3', bfloat16" in table
    (drawn,) = draw(model, tmp_path / "drawn.dot", level="ops")
    assert "pinned: rule '3', bfloat16" in unescape(drawn.read_text())
    model(x).sum().backward()
    assert all(torch.isfinite(each.grad).all() for each in model.parameters() if each.grad is not None)


def test_a_stage_may_raise_one_product_only() -> None:
    x, g = torch.randn(8, 64), torch.randn(8, 64)
    recipe = Recipe("mx", by_product=True)
    config: dict[str, Any] = {"method": "pfq", "stages": "FW(4,4)/BW(4,16)", "recipe": recipe}
    model = rewritten(deep(), x, **config)
    outputs, costs = [], []
    for precision in model.frac_config.stages.stages:
        model.set_precision(precision)
        model.zero_grad()
        outputs.append(model(x))
        outputs[-1].backward(g)
        costs.append(float(model.cost.cp))
    assert torch.equal(*outputs)  # the forward product stays at 4 bits
    assert costs == pytest.approx([(4 / 32) ** 2, ((4 / 32) ** 2 + 2 * (16 / 32) ** 2) / 3])
    op = fused_ops(model.graph_module)["1"]
    assert "both at the backward bits" in repr(op)
    x1, w = torch.randn(8, 64), torch.randn(64, 64)
    x1.requires_grad_(), w.requires_grad_()
    width, half = torch.tensor(4), torch.tensor(16)
    unused = get_format("mx").activation_range(x1)
    y = op((width, width, half), None, (unused, None), torch.tensor(0), x1, w, None)
    y.backward(g)
    rounded = [each.bfloat16().float() for each in (g, x1.detach(), w.detach())]
    torch.testing.assert_close(y, F.linear(fake_quantize(x1, "e2m1"), fake_quantize(w, "e2m1")))
    torch.testing.assert_close(x1.grad, rounded[0] @ rounded[2])
    torch.testing.assert_close(w.grad, rounded[0].T @ rounded[1])
