"""Products of groups of rows (experts) in every format: each group as a linear layer that has only its rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fractrain_fx import FracConfig, FracModel, Pin, fractrainify, summarize
from fractrain_fx.config import OperandRecipe, ProductRecipe, Recipe
from fractrain_fx.execution.fused_op import FusedOp
from fractrain_fx.execution.grouped_op import GroupedOp, aligned
from fractrain_fx.passes import fused_ops
from tests.build import rewritten
from tests.models import thinned

ENDS = (5, 5, 43, 50)  # of four experts: the second has no row
_ROW = OperandRecipe(per_row=True)
_ROWS = ProductRecipe(_ROW, _ROW)
_SQUARE = OperandRecipe(square=True)
_SQUARES = ProductRecipe(_SQUARE, _SQUARE)
FORMATS: dict[str, dict[str, Any]] = {
    "mx": {"format": "mx", "recipe": "mxfp8"},
    "mx at 4 bits": {"format": "mx", "recipe": "mxfp8", "precision": "FW-4/BW-4"},
    "fp8 in rows": {"format": "fp8", "recipe": Recipe("fp8", _ROWS, _ROWS, _ROWS)},
    "int in rows": {"format": "int", "recipe": Recipe("int", _ROWS, _ROWS, _ROWS)},
    "int in squares": {"format": "int", "recipe": Recipe("int", _SQUARES, _SQUARES, _SQUARES)},
    "bfloat16": {"format": "mx", "precision": "FW-16/BW-16"},
    "mx, and int in rows": {
        "format": "mx",
        "recipe": Recipe("mx", weight_gradient=ProductRecipe(_ROW, _ROW, format="int")),
        "precision": "FW-4/BW-4",
    },
}


class Experts(nn.Module):
    """A product of a layer's rows and stacked weights between two layers, which stay float."""

    def __init__(self, width: int = 40, outputs: int = 36, transposed: bool = True) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(width, width), nn.Linear(1, 1)
        shape = (len(ENDS), outputs, width) if transposed else (len(ENDS), width, outputs)
        self.weight = nn.Parameter(torch.randn(shape) / 4)
        self.transposed = transposed

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        weight = self.weight.mT if self.transposed else self.weight
        out = F.grouped_mm(self.stem(x), weight, offs=ends)
        return self.head(out.mean().view(1, 1))


class Rows(nn.Module):
    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.stem, self.inner, self.head = nn.Linear(width, width), nn.Linear(width, outputs, False), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.stem(x)).mean().view(1, 1))


def trained(net: nn.Module, *inputs: Tensor, **words: Any) -> FracModel:
    return rewritten(net, *inputs, check=True, **{"method": "static", **words}).train()


def only_op(model: FracModel) -> FusedOp:
    (op,) = fused_ops(model.graph_module).values()
    return op


def gradients(op: FusedOp, bits: str, x: Tensor, w: Tensor, g: Tensor, ends: Tensor | None) -> tuple[Tensor, ...]:
    """Output and both gradients of a fused op without noise in its rounding."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    width = torch.tensor(int(bits))
    ranges = tuple(None if each.weight else each.fmt.activation_range(x) for each in (op.plan.first, op.plan.second))
    out = op((width, width, width), None, ranges, torch.tensor(5), x, w, ends)
    return (out.detach(), *torch.autograd.grad(out, (x, w), g))


@pytest.mark.parametrize("words", FORMATS.values(), ids=FORMATS)
def test_each_expert_is_a_layer_that_has_only_its_rows(words: dict[str, Any]) -> None:
    x, g, w = torch.randn(50, 40), torch.randn(50, 36), torch.randn(4, 36, 40)
    x[:5] *= 100  # a scale that reached into another group would be far too large for it
    g[5:43] *= 30
    ends = torch.tensor(ENDS, dtype=torch.int32)
    bits = words.get("precision", "FW-8/BW-8").split("/")[0].removeprefix("FW-")
    op = only_op(trained(Experts(), x, ends, **words))
    assert isinstance(op, GroupedOp)
    out, of_x, of_w = gradients(op, bits, x, w.mT, g, ends)
    layer = only_op(trained(Rows(40, 36), x, **words))
    for expert, (start, end) in enumerate(zip((0, *ENDS), ENDS, strict=False)):
        rows = slice(start, end)
        if start == end:
            assert not of_w[expert].any()
            continue
        wanted = gradients(layer, bits, x[rows], w[expert], g[rows], None)
        # Sums of padded matrices have another order.
        for found, value in zip((out[rows], of_x[rows], of_w[expert].mT), wanted, strict=True):
            torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-5 * value.abs().max().item())


def test_groups_begin_at_whole_blocks() -> None:
    places, ends, rows = aligned(torch.tensor(ENDS, dtype=torch.int32), 52, 32)  # two rows have no expert
    assert ends.tolist() == [32, 32, 96, 128] and rows % 32 == 0 and rows >= 130
    assert places.tolist() == [*range(5), *range(32, 70), *range(96, 103), 128, 129]


@pytest.mark.parametrize("precision", ["FW-32/BW-32", "FW-8/BW-8"])
@pytest.mark.parametrize("transposed", [True, False])
def test_experts_in_affine_equal_the_graph_that_is_shown(transposed: bool, precision: str) -> None:
    x, ends = torch.randn(50, 40), torch.tensor(ENDS, dtype=torch.int32)
    net = Experts(transposed=transposed)
    model = trained(net, x, ends, precision=precision)
    x.requires_grad_()
    grads = []
    for shown in (True, False):
        twin = copy.deepcopy(model)
        out = twin.graph_module(x, ends)[0] if shown else twin(x, ends)
        grads.append([out.detach(), *torch.autograd.grad(out, [x, twin.get_parameter("weight")])])
    for found, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def mixture(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers

    size: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    size |= {"num_key_value_heads": 2, "num_experts_per_tok": 2}
    if name == "mixtral":
        config: Any = transformers.MixtralConfig(**size, intermediate_size=128, num_local_experts=4)
    else:
        config = transformers.Qwen3MoeConfig(**size, intermediate_size=128, moe_intermediate_size=64, num_experts=8)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    ids = torch.randint(64, (2, 16))
    return model, {"input_ids": ids, "labels": ids}


BLOCKS: dict[str, dict[str, Any]] = {
    "mxfp4": {"format": "mx", "precision": "FW-4/BW-4"},
    "nvfp4": {"format": "nvfp4", "precision": "FW-4/BW-4"},
    "fp8": {"format": "fp8"},
    "jetfire": {"format": "int"},
    "int8": {"format": "int", "recipe": "int8"},
}


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
@pytest.mark.parametrize("words", thinned(BLOCKS.values(), 4), ids=BLOCKS)
def test_nine_tenths_of_a_mixture_are_in_blocks(name: str, words: dict[str, Any]) -> None:
    model, batch = mixture(name)
    config = FracConfig(method="static", pins=(Pin("lm_head", words.get("precision", "FW-8/BW-8")),), **words)
    rewrite = fractrainify(model, config=config, example_kwargs=batch).train()
    ops = summarize(rewrite).ops
    rounded = sum(op.macs or 0 for op in ops if op.precision.rounds)
    assert rounded >= 0.9 * sum(op.macs or 0 for op in ops)
    loss = rewrite(**batch).loss
    loss.backward()
    grads = [parameter.grad for key, parameter in rewrite.named_parameters() if "experts" in key]
    assert grads and all(each is not None and each.isfinite().all() and each.any() for each in grads)
