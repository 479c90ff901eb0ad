"""Gated models take other lengths than the recorded one, also where positions are folded into the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from fractrain_fx import Engine, FracConfig, fractrainify
from fractrain_fx.passes import facts, ops_of


class Attending(nn.Module):
    """``nn.MultiheadAttention`` folds positions and samples, the first of them changing slowest."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Embedding(20, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.up, self.down, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        flat = x.reshape(-1, 8)  # a block whose entry has several rows a sample
        flat = flat + self.down(self.up(flat).relu())
        return self.head(flat.view(x.shape))


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    sizes: dict[str, Any] = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 64, "vocab_size": 20}
    return transformers.GPT2Model(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)), {}


@pytest.mark.parametrize("make", [lambda: (Attending(), {}), gpt2])
@pytest.mark.parametrize("fmt", ["affine", "dorefa"])
def test_samples_keep_their_own_choice_at_another_length(make: Any, fmt: str) -> None:
    torch.manual_seed(0)
    plain, _ = make()
    config = FracConfig(method="dfq", format=fmt)
    model = fractrainify(plain, config=config, example_inputs=(torch.randint(20, (2, 5)),), check=False)
    assert any((batch := facts(node).batch) is not None and batch.factor == 5 for node, _ in ops_of(model.graph))
    longer = torch.randint(20, (3, 9))
    engine = Engine(model)
    out = model(longer)
    out = out if isinstance(out, Tensor) else out.last_hidden_state
    assert out.shape[:2] == (3, 9)
    engine.loss(out.square().mean()).backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if n.startswith("frac."))
    # Each sample by itself, over the ranges that were seen: choices and values are those it has in the batch.
    model.eval()
    with torch.no_grad():
        together = model(longer)
        choices = {name: choice.clone() for name, choice in model.cost.choice.items()}
        for i in range(3):
            alone = model(longer[i : i + 1])
            pair = [each if isinstance(each, Tensor) else each.last_hidden_state for each in (alone, together)]
            torch.testing.assert_close(pair[0][0], pair[1][i], rtol=1e-4, atol=1e-4)
            for name, choice in model.cost.choice.items():
                assert torch.equal(choice[0], choices[name][i])
