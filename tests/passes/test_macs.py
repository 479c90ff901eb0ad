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


def test_what_has_no_formula_is_listed_as_uncounted_and_not_as_nothing() -> None:
    ops = {op.name: op for op in rewritten(Case(Recurrent(), (torch.randn(2, 5, 4),))).ops}
    assert ops["rnn"].macs is None
    assert ops["rnn"].precision.mode == "uncounted"
    assert ops["stem"].macs == 5 * 4 * 4
