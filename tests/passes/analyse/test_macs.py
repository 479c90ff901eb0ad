"""MACs against torch's own counter where that is right, and against formulas worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fractrain_fx import FracConfig, FracModel, fractrainify, plan
from fractrain_fx.nn.quantizers import WeightQuantizer
from fractrain_fx.passes import Product, facts, ops_of
from fractrain_fx.passes.graph.formulas import recurrent_macs
from tests.build import rewritten as build_rewritten
from tests.models import HOME_MADE, HUGGING_FACE, TIMM, Case, build, some_long, thinned
from tests.passes.analyse.calls import Calls


def rewritten(case: Case) -> FracModel:
    return build_rewritten(case, method="pfq")


ALL_PRODUCTS = ["resnet18", "vit_tiny_patch16_224", "densenet121", "bert", "gpt2", "t5", "if_on_shape"]
OTHERS = [name for name in (*TIMM, *HUGGING_FACE, *HOME_MADE) if name not in {*ALL_PRODUCTS, "mixtral"}]


@pytest.mark.parametrize("name", [*thinned(OTHERS, 3), *some_long(ALL_PRODUCTS, *ALL_PRODUCTS)])
def test_macs_are_half_of_torchs_forward_flops(name: str) -> None:
    case = build(name)
    case.model.eval()
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        case.model(*case.args, **case.keywords)
    batch = 2
    ops = ops_of(rewritten(case).graph)
    # What all samples share (relative positions, say) is computed once for the batch.
    total = sum((op.macs or 0) * (1 if facts(node).batch is None else batch) for node, op in ops)
    assert total == counter.get_total_flops() // 2


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.grouped = nn.Conv2d(4, 8, 3, padding=1, groups=2)
        self.dilated = nn.Conv2d(8, 8, 3, padding=2, dilation=2)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2, groups=2)
        self.one = nn.Conv1d(4, 6, 5)
        self.mix = nn.Parameter(torch.randn(6, 7))

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.dilated(self.grouped(x)))
        x = self.one(x.flatten(2))
        x = torch.einsum("bct,cd->bdt", x, self.mix)
        x = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)
        return x @ x.transpose(-1, -2)


def test_every_family_has_its_closed_form() -> None:
    model = rewritten(Case(Everything(), (torch.randn(3, 4, 6, 6),)))
    t = 12 * 12 - 4
    assert {op.name: op.macs for op in model.ops} == {
        "grouped": 8 * 6 * 6 * (4 // 2) * 9,
        "dilated": 8 * 6 * 6 * 8 * 9,
        "up": 8 * 6 * 6 * (4 // 2) * 4,
        "one": 6 * t * 4 * 5,
        "mix": 6 * 7 * t,
        "matmul": 7 * 7 * t,
        "matmul_1": 7 * 7 * t,
        "matmul_2": 7 * t * 7,
    }


@pytest.mark.parametrize("name", some_long(ALL_PRODUCTS, "densenet121"))
def test_all_three_products_of_training_are_half_of_torchs_flops(name: str) -> None:
    """Without groups and with attention in plain products torch's counter is right in the backward pass, too."""
    case = build(name)
    ops = list(ops_of(rewritten(case).graph))
    case.model.train()
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        output = case.model(*case.args, **case.keywords)
        (output if isinstance(output, Tensor) else output.loss).sum().backward()
    batch = 2
    total = sum(sum(op.training_macs) * (1 if facts(node).batch is None else batch) for node, op in ops)
    assert total == counter.get_total_flops() // 2


def test_where_torchs_counter_is_wrong_the_formula_is_the_hands() -> None:
    """What docs/background/macs.md says of the counter, so that a change of torch's is noticed."""
    x = torch.randn(1, 8, 6, 6)
    conv = nn.Conv2d(8, 12, 3, padding=1, groups=4, bias=False)
    with FlopCounterMode(display=False) as counter:
        conv(x.requires_grad_()).sum().backward()
    macs = 12 * 36 * (8 // 4) * 9
    assert counter.get_total_flops() // 2 != 3 * macs

    q = torch.randn(1, 2, 16, 8, requires_grad=True)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        F.scaled_dot_product_attention(q, q, q).sum().backward()
    macs = 2 * 16 * 16 * (8 + 8)
    # The scores are computed again. Before torch 2.15 the counter does not see fused attention on a CPU.
    assert counter.get_total_flops() // 2 in (0, macs * (1 + 2.5))

    lstm = nn.LSTM(4, 8)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        lstm(torch.randn(5, 2, 4))
    assert counter.get_total_flops() == 0


def test_grouped_convolutions_cost_the_same_in_each_direction() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 12, 3, padding=1, groups=4))
    ops = {
        op.name: op
        for op in rewritten(Case(model.append(nn.Flatten()).append(nn.Linear(432, 2)), (torch.randn(2, 4, 6, 6),))).ops
    }
    assert ops["2"].training_macs == (12 * 36 * (8 // 4) * 9,) * 3
    assert ops["0"].training_macs == (8 * 36 * 4 * 9, 0, 8 * 36 * 4 * 9)


def heads(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """4 query heads of width 2, and 2 of keys and values."""
    few = x.unflatten(-1, (-1, 2)).transpose(1, 2)
    return few.repeat(1, 2, 1, 1), few, few


T, W = 5, 4  # positions and width of a sample
CALLS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...], int]] = {
    "mv": (lambda x, v: torch.mv(x[:, 0], v), ((4,),), W),
    "addmv": (lambda x, v: torch.addmv(x[:, 0, 0], x[:, 0], v), ((4,),), W),
    "inner": (lambda x, w: torch.inner(x, w), ((6, 4),), T * W * 6),
    "outer": (lambda x, v: torch.outer(x[:, 0, 0], v), ((7,),), 7),
    "tensordot": (lambda x, w: torch.tensordot(x, w, dims=([2], [0])), ((4, 6),), T * W * 6),
    "tensordot of two": (lambda x, w: torch.tensordot(x, w, dims=2), ((5, 4, 6),), T * W * 6),
    "einsum of lists": (lambda x, w: torch.einsum(x, [0, 1, 2], w, [2, 3], [0, 1, 3]), ((4, 6),), T * W * 6),
    "einsum without output": (lambda x, w: torch.einsum("bti,ij", x, w), ((4, 6),), T * W * 6),
    "einsum that sums first": (lambda x, w: torch.einsum("bti,jk->bk", x, w), ((4, 6),), 6),
    "einsum with dots": (lambda x, w: torch.einsum("...i,oi->...o", x, w), ((6, 4),), T * W * 6),
    "linalg.matmul": (lambda x, w: torch.linalg.matmul(x, w), ((4, 6),), T * W * 6),
    "aten.mm": (lambda x, w: torch.ops.aten.mm.default(x[:, 0], w), ((4, 6),), W * 6),
    "aten.linear": (lambda x, w: torch.ops.aten.linear.default(x, w), ((6, 4),), T * W * 6),
    "conv_tbc": (
        lambda x, w: torch.conv_tbc(x.transpose(0, 1).contiguous(), w, w[0, 0]),
        ((3, 4, 6),),
        (T - 2) * 6 * 3 * W,
    ),
    "weight first": (lambda x, w: w @ x.transpose(1, 2), ((6, 4),), T * W * 6),
    "bilinear": (lambda x, w: F.bilinear(x, x, w), ((7, 4, 4),), T * 7 * W * (W + 1)),
    "einsum of three": (lambda x, w, u: torch.einsum("bti,ij,jk->btk", x, w, u), ((4, 6), (6, 7)), T * (W * 6 + 6 * 7)),
    "multi_dot": (lambda x, w, u: torch.linalg.multi_dot([x[:, 0], w, u]), ((4, 6), (6, 7)), W * 6 + 6 * 7),
    # Masked positions are computed, and each of the 4 query heads meets its keys and values.
    "causal": (lambda x: F.scaled_dot_product_attention(*(x[:, None],) * 3, is_causal=True), (), T * T * (W + W)),
    "grouped heads": (lambda x: F.scaled_dot_product_attention(*heads(x), enable_gqa=True), (), 4 * T * T * (2 + 2)),
}


@pytest.mark.parametrize("name", thinned(CALLS, 2))
def test_other_products_have_their_closed_form(name: str) -> None:
    call, shapes, macs = CALLS[name]
    case = Case(Calls(call, *shapes), (torch.randn(3, T, W),))
    for method in ("float", "pfq"):
        model = fractrainify(case.model, config=FracConfig(method=method), example_inputs=case.args, check=False)
        inside = [op for op in model.ops if op.name not in ("stem", "middle", "head")]
        assert sum(op.macs or 0 for op in inside) == macs
        assert {op.precision.mode for op in inside} <= {"scheduled", "float"}
        model(*case.args).sum().backward()
        assert all(p.grad is not None for p in case.model.parameters())


def test_addbmm_adds_up_one_product_for_each_matrix() -> None:
    call = Calls(lambda x: torch.addbmm(torch.zeros(T, T), x, x.transpose(1, 2)))
    ops = {
        op.name: op for op in plan(call, config=FracConfig(method="pfq"), example_inputs=(torch.randn(3, T, W),)).ops
    }
    assert ops["addbmm"].macs == 3 * T * W * T


def test_a_weight_that_stands_first_is_rounded_by_its_own_rows_and_a_vector_as_a_whole() -> None:
    def dims(call: Callable[..., Tensor], shape: tuple[int, ...]) -> set[int | None]:
        model = build_rewritten(Calls(call, shape), torch.randn(3, T, W), method="pfq")
        return {module.dim for module in model.modules() if isinstance(module, WeightQuantizer)} - {0}

    assert dims(lambda x, v: x @ v, (4,)) == {None}
    assert dims(lambda x, w: x @ w, (4, 6)) == {1}
    assert dims(lambda x, w: w @ x.transpose(1, 2), (6, 4)) == set()


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.one, self.two = nn.EmbeddingBag(9, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.two(self.one(self.bag(tokens)).relu())


def test_looking_up_multiplies_nothing() -> None:
    ops = plan(Bag(), config=FracConfig(method="pfq"), example_inputs=(torch.randint(9, (2, 3)),)).ops
    assert [op.name for op in ops] == ["one", "two"]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 2)
        self.stem = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.stem(x))[0][:, -1])


def test_recurrent_layers_meet_each_matrix_at_every_step() -> None:
    model = rewritten(Case(Recurrent(), (torch.randn(2, 5, 4),)))
    ops = {op.name: op for op in model.ops}
    assert ops["rnn"].macs == 5 * 4 * 8 * (4 + 8)
    assert ops["rnn"].precision.mode == "float"
    assert "weights are quantized" in ops["rnn"].precision.reason
    assert ops["stem"].macs == 5 * 4 * 4
    assert model.macs == sum(op.macs or 0 for op in model.ops)


@pytest.mark.parametrize(
    ("layer", "macs"),
    [
        (nn.LSTM(4, 8, num_layers=2, bidirectional=True), 7 * 2 * 4 * 8 * ((4 + 8) + (16 + 8))),
        (nn.LSTM(4, 8, proj_size=3), 7 * (4 * 8 * (4 + 3) + 3 * 8)),
        (nn.GRU(4, 8), 7 * 3 * 8 * (4 + 8)),
        (nn.RNN(4, 8), 7 * 8 * (4 + 8)),
    ],
)
def test_recurrent_families_by_hand_and_by_torchs_counter(layer: nn.Module, macs: int) -> None:
    assert recurrent_macs(layer, (7, 1, 4)) == macs
    # With oneDNN a recurrent layer is one operator, of which the counter knows nothing.
    with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(torch.randn(7, 1, 4))
    assert counter.get_total_flops() // 2 == macs


def test_expert_products_count_each_token_as_often_as_it_is_routed() -> None:
    ops = {op.name: op for op in rewritten(build("mixtral")).ops}
    tokens, width, inner, routed = 12, 32, 64, 2
    for layer in ("model.layers.0.mlp", "model.layers.1.mlp"):
        assert ops[f"{layer}.gate"].macs == tokens * width * 4
        assert ops[f"{layer}.experts.gate_up_proj"].macs == routed * tokens * width * 2 * inner
        assert ops[f"{layer}.experts.down_proj"].macs == routed * tokens * inner * width


@dataclass
class Parts:
    """An output class."""

    first: Tensor
    second: Tensor


class Chain(nn.Module):
    """Three layers, of which the third may read what no gradient passes."""

    def __init__(self, third: Callable[[Tensor, nn.Module], Any]) -> None:
        super().__init__()
        self.third = third
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.third(self.b(self.a(x)), self.c)


def without_gradient(x: Tensor, c: nn.Module) -> Any:
    with torch.no_grad():
        y = c(x)
    return x + y


def written(x: Tensor, c: nn.Module) -> Any:
    buffer = torch.zeros_like(x)
    buffer[:, :2] = c(x)[:, :2]
    return buffer


BACKWARD: dict[str, tuple[Callable[[Tensor, nn.Module], Any], tuple[str, str]]] = {
    "detach": (lambda x, c: c(x.detach()), ("", "c")),
    "relu in place, then detach": (lambda x, c: c(F.relu(x, inplace=True).detach()), ("", "c")),
    "detach and a size": (lambda x, c: c(x.detach().view(x.shape[0], x.size(1))), ("", "c")),
    "no_grad": (without_gradient, ("b", "ab")),
    "an index": (lambda x, c: (x, c(x).argmax(1)), ("b", "ab")),
    "written": (written, ("bc", "abc")),
    "an output class": (lambda x, c: Parts(x.detach(), c(x)), ("bc", "abc")),
    "a detached output": (lambda x, c: Parts(x, c(x).detach()), ("b", "ab")),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_backward_products_are_those_that_a_gradient_of_the_output_reaches(name: str) -> None:
    call, (eb, gc) = BACKWARD[name]
    ops = plan(Chain(call), config=FracConfig(method="float"), example_inputs=(torch.randn(2, 4),)).ops
    assert {op.name: op.training_macs for op in ops} == {
        layer: (16, 16 * (layer in eb), 16 * (layer in gc)) for layer in "abc"
    }


UNCOUNTED: dict[str, Callable[..., Tensor]] = {
    "linalg_vecdot": lambda x, w: torch.linalg.vecdot(x, w[0]),
    "convolution": lambda x, w: torch.convolution(x, w[..., None], None, [1], [0], [1], False, [0], 1),
    "mm": lambda x, w: torch.ops.aten.mm.default(self=x[:, 0], mat2=w),
    "addmm_": lambda x, w: x[:, 0].clone().addmm_(x[:, 1], w),
    "fft_rfft": lambda x, w: torch.fft.rfft(x).real,
    "linalg_matrix_power": lambda x, w: torch.linalg.matrix_power(x[:, :W], 2),
    "_sparse_mm": lambda x, w: torch.sparse.mm(torch.eye(W).to_sparse(), x[:, 0].t()),
}


@pytest.mark.parametrize("name", UNCOUNTED)
def test_every_call_of_torch_that_multiplies_has_a_row(name: str) -> None:
    case = Case(Calls(UNCOUNTED[name], (W, W)), (torch.randn(3, T if name != "convolution" else W, W),))
    ops = plan(case.model, config=FracConfig(method="float"), example_inputs=case.args).ops
    assert [(op.kind, op.macs, op.precision.mode) for op in ops if op.name not in ("stem", "middle", "head")] == [
        (name, None, "uncounted")
    ]


class Distances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 4), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(torch.cdist(x, x))


def test_what_has_no_formula_is_listed_as_uncounted_and_not_as_nothing() -> None:
    ops = {op.name: op for op in rewritten(Case(Distances(), (torch.randn(2, 5, 4),))).ops}
    assert ops["cdist"].macs is None
    assert ops["cdist"].precision.mode == "uncounted"
    assert ops["stem"].macs == 5 * 4 * 4


@pytest.mark.parametrize(
    "name", thinned(["swin_tiny_patch4_window7_224", "levit_128s", "mobilenetv2_100", "gpt2", "t5"], 3)
)
def test_every_op_is_equal_convolutions_with_the_same_macs(name: str) -> None:
    model = rewritten(build(name))
    assert [op.name for op in model.ops if op.macs and op.product is None] == []
    for op in model.ops:
        assert op.product is None or op.product.macs == op.macs
        # A batch shares the weights of a model, and nothing else.
        assert op.product is None or op.product.shared == (op.kind in ("conv", "linear", "addmm"))


def test_convolutions_on_squares_stay_convolutions_and_the_rest_becomes_matrix_products() -> None:
    products = {op.name: op.product for op in rewritten(Case(Everything(), (torch.randn(3, 4, 6, 6),))).ops}
    assert products["grouped"] == Product(3, 6, 6, 1, 2, 4, repeats=2)
    assert products["dilated"] == Product(1, 1, 1, 1, 72, 8, rows=36)
    assert products["up"] == Product(1, 1, 1, 1, 4, 8, rows=36, repeats=2)
    assert products["one"] == Product(1, 1, 1, 1, 20, 6, rows=140)
