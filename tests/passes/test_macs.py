"""MACs against torch's own counter where that is right, and against formulas worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fractrain_fx import FracConfig, FracModel, fractrainify
from fractrain_fx.passes import facts, ops_of
from fractrain_fx.passes.contractions import recurrent_macs
from tests.models import HOME_MADE, HUGGING_FACE, TIMM, Case, build


def rewritten(case: Case) -> FracModel:
    config = FracConfig(method="pfq")
    return fractrainify(case.model, config=config, example_inputs=case.args, example_kwargs=case.keywords, check=False)


@pytest.mark.parametrize("name", [name for name in (*TIMM, *HUGGING_FACE, *HOME_MADE) if name != "mixtral"])
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
def test_recurrent_families_by_hand(layer: nn.Module, macs: int) -> None:
    assert recurrent_macs(layer, (7, 1, 4)) == macs


def test_expert_products_count_each_token_as_often_as_it_is_routed() -> None:
    ops = {op.name: op for op in rewritten(build("mixtral")).ops}
    tokens, width, inner, routed = 12, 32, 64, 2
    for layer in ("model.layers.0.mlp", "model.layers.1.mlp"):
        assert ops[f"{layer}.gate"].macs == tokens * width * 4
        assert ops[f"{layer}.experts.gate_up_proj"].macs == routed * tokens * width * 2 * inner
        assert ops[f"{layer}.experts.down_proj"].macs == routed * tokens * inner * width


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
