"""Affine rounding with a range for each row, or for each sample and head: its values, and that scales factor out."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import AffineConfig, Engine, FracConfig, Pin, RunConfig, fractrainify
from fractrain_fx.config import Backend, Method
from fractrain_fx.formats import Format, Operand, get_format
from fractrain_fx.formats.affine import RangedAffineFormat, fake_quantize
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.kernels.formats import AffineByKernels
from fractrain_fx.nn.rounding import gate_gradient

SEED = torch.tensor(3)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_row_is_rounded_as_if_alone(bits: int) -> None:
    fmt, x = (
        get_format("affine", affine=AffineConfig(ranges="row")),
        torch.randn(5, 7) * torch.tensor([1e-3, 1, 10, 1e3, 0]).view(5, 1),
    )
    assert torch.equal(fmt.operand(x, bits, Operand("forward", "x", (1,))), fake_quantize(x, bits, dim=0))
    assert torch.equal(fmt.operand(x, bits, Operand("weight_gradient", "x", (0,))), fake_quantize(x, bits, dim=1))
    assert torch.equal(fmt.operand(x, 32, Operand("forward", "x", (1,))), x)


def test_samples_have_bits_of_their_own_and_a_bad_value_spoils_its_row_only() -> None:
    fmt, x, of = (
        get_format("affine", affine=AffineConfig(ranges="row")),
        torch.randn(4, 6),
        Operand("forward", "x", (1,)),
    )
    found = fmt.operand(x, torch.tensor([0, 4, 8, 32]).view(4, 1), of)
    assert torch.equal(found[[0, 3]], x[[0, 3]])
    assert torch.equal(found[1:3], torch.stack([fake_quantize(x[1], 4), fake_quantize(x[2], 8)]))
    x[2, 0] = torch.inf
    found = fmt.operand(x, 8, of)
    assert found[2].isnan().all() and found[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("backend", ["plain", "cpu"])
@pytest.mark.parametrize("method", ["static", "pfq", "dfq"])
def test_a_sample_computes_the_same_in_every_batch(method: Method, backend: Backend) -> None:
    config = FracConfig(method=method, affine=AffineConfig(ranges="sample"), run=RunConfig(backend=backend))
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 8), nn.Linear(8, 3)
    )
    x = torch.randn(4, 3, 8, 8) * torch.tensor([1e-3, 1, 1, 100]).view(4, 1, 1, 1)
    model = fractrainify(net, config=config, example_inputs=(x,))
    engine = Engine(model, epochs=4)
    engine.loss(model(x).square().mean()).backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in model.parameters())
    model.eval()
    alone = torch.cat([model(each[None]) for each in x])
    torch.testing.assert_close(model(x), alone, rtol=1e-5, atol=1e-6)
    if method != "dfq":
        torch.testing.assert_close(model.deployed()(x), alone, rtol=1e-5, atol=1e-6)


BY_SAMPLE = [get_format("affine", affine=AffineConfig(ranges="sample")), AffineByKernels(AffineConfig(ranges="sample"))]
AXES = {
    "images": ((4, 3, 5, 5), BatchAxis()),
    "second dimension": ((6, 4, 3), BatchAxis(1)),
    "rows of a sample together": ((12, 5), BatchAxis(0, 3)),
    "rows of a sample apart": ((12, 5), BatchAxis(0, 3, major=False)),
    "another length than recorded": ((8, 5), BatchAxis(0, 3)),
    "bits of each sample": ((4, 3, 5, 5), BatchAxis()),
}


@pytest.mark.parametrize("fmt", BY_SAMPLE, ids=["plain", "kernels"])
@pytest.mark.parametrize("name", AXES)
def test_each_sample_of_a_gradient_is_rounded_as_if_alone(name: str, fmt: Format) -> None:
    shape, axis = AXES[name]
    bits = torch.tensor([2, 4, 8, 4]).view(4, 1, 1, 1) if name == "bits of each sample" else torch.tensor(4)
    # Eight rows hold no whole number of samples of three: each row is then a part.
    count = 8 if shape == (8, 5) else 4
    g = axis.expand(torch.logspace(-6, 0, count), shape) * torch.randn(shape)
    samples = axis.samples_first(g, count)
    error = axis.samples_first(fmt.gradient(g, bits, axis=axis, seed=SEED) - g, count).abs()
    step = (samples.amax(1) - samples.amin(1)) / (2.0 ** bits.flatten() - 1)
    assert (error.amax(1) <= step * 1.001).all() and (error.amax(1) > step / 10).all()


@pytest.mark.parametrize("fmt", BY_SAMPLE, ids=["plain", "kernels"])
@pytest.mark.parametrize("name", ["images", "second dimension", "rows of a sample together", "rows of a sample apart"])
def test_gates_are_told_what_each_option_does_in_the_range_of_a_sample(name: str, fmt: Format) -> None:
    shape, axis = AXES[name]
    # The third sample is narrower than the smallest scale, and the last one is constant.
    x, g = axis.expand(torch.tensor([1e-3, 50, 1e-7, 0]), shape) * torch.randn(shape), torch.randn(shape)
    for dtype in (torch.float32, torch.bfloat16):
        x, g = x.to(dtype), g.to(dtype)
        within = fmt.sample_ranges(x, axis)
        found = gate_gradient(fmt, x, g, (0, 3, 6, 8, 32), axis, within, 4, "straight-through")
        wanted = []
        for bits in (0, 3, 6, 8, 32):
            errors = (fmt.activation(x, bits, within).double() - x.double()) * g.double()
            wanted.append(axis.samples_first(errors, 4).sum(1))
        # Kernels leave out that scales are 1e-8 at least.
        close = 1e-13 if fmt is BY_SAMPLE[0] or dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(found.double(), torch.stack(wanted, 1), rtol=1e-3, atol=close)


@pytest.mark.parametrize("affine", [AffineConfig(ranges="row"), AffineConfig("zero"), AffineConfig(ranges="sample")])
def test_a_rule_that_names_the_format_has_its_settings(affine: AffineConfig) -> None:
    def gradient(number_format: str, affine: AffineConfig) -> Tensor:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
        config = FracConfig(
            method="static",
            format=number_format,
            pins=(Pin("first", "FW-3/BW-3", "affine"), Pin("last", recipe="mxfp8")),
            affine=affine,
            run=RunConfig(backend="plain"),
        )
        x = torch.randn(3, 6) * torch.tensor([[1e-2], [1.0], [10.0]])
        model = fractrainify(net, config=FracConfig.from_dict(config.to_dict()), example_inputs=(x,)).train()
        torch.manual_seed(0)
        model(x).square().sum().backward()
        found = net.get_parameter("0.weight").grad
        assert found is not None
        return found

    assert torch.equal(gradient("affine", affine), gradient("mx", affine))
    assert not torch.equal(gradient("affine", affine), gradient("affine", AffineConfig()))


def test_the_scales_of_rows_are_the_distances_of_their_levels() -> None:
    x, of = torch.tensor([[0.0, 1.0, 15.0], [2.0, 2.0, 2.0], [0.0, 1.0, 30.0]]), Operand("forward", "x", (1,))
    for bits, wanted in ((torch.tensor(4), [1.0, 0.0, 2.0]), (torch.tensor([4, 4, 32]).view(3, 1), [1.0, 0.0, 0.0])):
        scales = get_format("affine", affine=AffineConfig(ranges="row")).reach(x, bits, of, None).scales
        assert scales is not None and scales.flatten().tolist() == wanted


class Attention(nn.Module):
    """The first product of attention, between layers that stay float."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 12), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.stem(x).chunk(2, -1)
        return self.head(torch.matmul(query, key.mT))


def between(layer: nn.Module, *, stem: nn.Module, head: nn.Module) -> nn.Module:
    return nn.Sequential(stem, layer, head)


LINEAR = between(nn.Linear(8, 10), stem=nn.Linear(4, 8), head=nn.Linear(10, 3))
CONV = between(nn.Conv2d(8, 6, 3), stem=nn.Conv2d(3, 8, 1), head=nn.Conv2d(6, 2, 1))
# The shapes of the ranges of x, w and g: where one has size 1, the range is constant, and so its scale factors out.
EXPECTED = {
    ("linear", "row"): [(2, 3, 1), (10, 1), (2, 3, 1), (1, 8), (1, 1, 10), (1, 1, 8)],
    ("linear", "head"): [(1, 1, 1), (10, 1), (1, 1, 1), (10, 1), (1, 1, 1), (1, 1, 1)],
    ("conv", "row"): [(2, 1, 1, 1), (6, 1, 1, 1), (2, 1, 1, 1), (1, 8, 1, 1), (1, 6, 1, 1), (1, 8, 1, 1)],
    ("conv", "head"): [(1, 1, 1, 1), (6, 1, 1, 1), (1, 1, 1, 1), (6, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1)],
    ("attention", "row"): [(2, 4, 5, 1), (2, 4, 1, 5), (2, 4, 5, 1), (2, 4, 6, 1), (2, 4, 1, 5), (2, 4, 1, 6)],
    ("attention", "head"): [(2, 4, 1, 1)] * 6,
}
INPUTS = {"linear": (2, 3, 4), "conv": (2, 3, 5, 5), "attention": (2, 4, 5, 6)}


@pytest.mark.parametrize(("kind", "ranges"), EXPECTED, ids=str)
def test_ranges_are_constant_along_what_a_product_sums_over(
    kind: str, ranges: Literal["row", "head"], monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x = {"linear": LINEAR, "conv": CONV, "attention": Attention()}[kind], torch.randn(INPUTS[kind])
    config = FracConfig(method="static", affine=AffineConfig(ranges=ranges))
    model = fractrainify(net, config=config, example_inputs=(x,), check=False).train()
    seen: dict[tuple[str, str], tuple[int, ...]] = {}
    range_of = RangedAffineFormat.range_of

    def recorded(self: RangedAffineFormat, x: Tensor, of: Operand) -> object:
        found = range_of(self, x, of)
        seen[of.product, of.tensor] = tuple(found.lo.shape)
        return found

    monkeypatch.setattr(RangedAffineFormat, "range_of", recorded)
    model(x).square().sum().backward()
    order = [("forward", "x"), ("forward", "w"), ("input_gradient", "g"), ("input_gradient", "w")]
    order += [("weight_gradient", "g"), ("weight_gradient", "x")]
    assert [seen[each] for each in order] == EXPECTED[kind, ranges]


def test_products_of_codes_and_their_sums_give_the_product_of_rows() -> None:
    fmt: Any = get_format("affine", affine=AffineConfig(ranges="row"))
    x, w = torch.randn(5, 40).double(), torch.randn(6, 40).double()
    operands = ((x, Operand("forward", "x", (1,))), (w, Operand("forward", "w", (1,), channel=0, weight=True)))
    found = [(fmt.operand(each, 8, of), fmt.range_of(each, of)) for each, of in operands]
    (a, low_a, step_a), (b, low_b, step_b) = (
        (((rounded - lo) / (span / 255)).round(), lo, span / 255) for rounded, (lo, span, _) in found
    )
    sums = step_a * step_b.T * (a @ b.T) + step_a * a.sum(1, keepdim=True) * low_b.T
    sums += low_a * (step_b * b.sum(1, keepdim=True)).T + 40 * low_a * low_b.T
    assert torch.allclose(sums, found[0][0] @ found[1][0].T, atol=1e-9)


def test_a_gradient_of_heads_is_rounded_once_and_one_of_rows_for_each_product() -> None:
    g = torch.randn(2, 4, 5, 6)
    pair = (Operand("input_gradient", "g", (3,), across=(2,)), Operand("weight_gradient", "g", (2,), across=(3,)))
    first, second = (
        get_format("affine", affine=AffineConfig(ranges="head")).operand(g, 4, of, seed=SEED) for of in pair
    )
    assert torch.equal(first, second)
    of_head = fake_quantize(g.flatten(0, 1), 4, dim=0).view_as(g)
    assert (first - of_head).abs().max() > 0  # rounded by chance
    first, second = (
        get_format("affine", affine=AffineConfig(ranges="row")).operand(g, 4, of, seed=SEED) for of in pair
    )
    assert not torch.equal(first, second)
    sparse = g * (torch.rand_like(g) < 0.5)
    kept = get_format("affine", affine=AffineConfig(ranges="row", gradient_grid="zero")).operand(
        sparse, 4, pair[0], seed=SEED
    )
    assert (kept[sparse == 0] == 0).all() and (kept != 0).any()


def test_finer_ranges_need_no_calibration_and_say_what_they_are() -> None:
    x = torch.randn(2, 4, 5, 6)
    for ranges, words in (("row", "x affine (a range a row)"), ("head", "x affine (a range a sample and head)")):
        config = FracConfig(method="static", affine=AffineConfig(ranges=ranges), precision="FW-8/BW-8")  # type: ignore[arg-type]
        net = Attention()
        model = fractrainify(net, config=config, example_inputs=(x,), check=False).eval()
        assert words in str(model.graph_module)
        assert (model(x) - net(x)).norm() < 0.02 * net(x).norm()


def test_rows_lose_less_than_a_tensor_where_rows_differ_in_size() -> None:
    x = torch.randn(8, 64) * torch.logspace(-3, 1, 8).view(8, 1)
    of = Operand("forward", "x", (1,))
    errors = {}
    for ranges in ("tensor", "row"):
        rounded = get_format("affine", affine=AffineConfig(ranges=ranges)).operand(x, 4, of)
        errors[ranges] = ((rounded - x).norm(dim=1) / x.norm(dim=1)).max()
    assert errors["row"] < 0.2 and errors["tensor"] > 10


@pytest.mark.long
@pytest.mark.parametrize("ranges", ["row", "head"])
def test_one_compiled_graph_serves_all_widths_with_the_same_values(ranges: Literal["row", "head"]) -> None:
    fmt, x = get_format("affine", affine=AffineConfig(ranges=ranges)), torch.randn(3, 20, 40)
    of = Operand("forward", "x", (2,), across=(1,))
    compiled = torch.compile(lambda bits: fmt.operand(x, bits, of), fullgraph=True)
    for width in (2, 4, 8, 32):
        assert torch.allclose(compiled(torch.tensor(width)), fmt.operand(x, width, of), atol=1e-6)
