"""Residual blocks as authors write them: each module has the structure of a published one, in a few lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import FracModel
from fractrain_fx.passes.graph.facts import facts
from tests import build

WIDTH = 8


def rewritten(model: nn.Module, *args: Any, method: str = "dfq") -> FracModel:
    torch.manual_seed(0)
    return build.rewritten(model, *args, config=build.paper(method))


def skips(model: FracModel) -> Counter[str]:
    return Counter(block.skip for block in model.blocks if block.skip is not None)


class Add(nn.Module):
    """The add as a module of its own (x-transformers' ``Residual``, tsai's ``Add``)."""

    def forward(self, branch: Tensor, skip: Tensor) -> Tensor:
        return branch + skip


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, query: Tensor, memory: Tensor, previous: Tensor | None = None) -> tuple[Tensor, Tensor]:
        scores = self.q(query) @ self.k(memory).transpose(1, 2)
        if previous is not None:
            scores = scores + previous
        return self.out(scores.softmax(-1) @ self.v(memory)), scores


class Layer(nn.Module):
    """Attention and MLP; ``scores`` of the layer before may be added to its own (RealFormer, tsai's PatchTST)."""

    def __init__(self, add: nn.Module | None = None) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention, self.add = Attention(), add
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def sum(self, branch: Tensor, skip: Tensor) -> Tensor:
        return skip + branch if self.add is None else self.add(branch, skip)

    def forward(self, x: Tensor, queries: int | None = None, scores: Tensor | None = None) -> tuple[Tensor, Tensor]:
        normed = self.norms[0](x)
        out, scores = self.attention(normed[:, :queries], normed, scores)
        x = self.sum(out, x)
        return self.sum(self.mlp(self.norms[1](x)), x), scores


class Transformer(nn.Module):
    """Two layers over feature vectors. ``cls``: the last one attends from its first token alone (rtdl)."""

    def __init__(self, layer: Callable[[], Layer] = Layer, cls: bool = False, realformer: bool = False) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
        self.layers, self.cls, self.realformer = nn.ModuleList(layer() for _ in range(2)), cls, realformer

    def forward(self, x: Tensor) -> Tensor:
        x, scores = self.layers[0](self.stem(x))
        x, _ = self.layers[1](x, 1 if self.cls else None, scores if self.realformer else None)
        return self.head(x[:, 0])


class Inception(nn.Module):
    """Separable convolutions and a pool side by side; no activation before the add (tsai's Inception, Xception)."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.narrow = nn.Conv1d(inputs, 4, 1, bias=False)
        self.convs = nn.ModuleList(nn.Conv1d(4, 4, size, padding=size // 2) for size in (3, 5))
        self.pool = nn.Sequential(nn.MaxPool1d(3, stride=1, padding=1), nn.Conv1d(inputs, 4, 1))
        self.shortcut = (
            nn.Sequential(nn.Conv1d(inputs, 12, 1), nn.BatchNorm1d(12)) if inputs != 12 else nn.BatchNorm1d(12)
        )
        self.add = Add()

    def forward(self, x: Tensor) -> Tensor:
        narrow = self.narrow(x)
        branch = torch.cat([*(conv(narrow) for conv in self.convs), self.pool(x)], dim=1)
        return self.add(branch, self.shortcut(x)).relu()


class Temporal(nn.Module):
    """A block of weight-normalised causal convolutions, whose branch also joins a sum over all blocks."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        normed = nn.utils.parametrizations.weight_norm
        self.one, self.two = normed(nn.Conv1d(inputs, WIDTH, 3)), normed(nn.Conv1d(WIDTH, WIDTH, 3))
        self.down = nn.Conv1d(inputs, WIDTH, 1) if inputs != WIDTH else nn.Identity()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.one(nn.functional.pad(x, (2, 0))).relu()
        out = self.two(nn.functional.pad(out, (2, 0))).relu()
        return (out + self.down(x)).relu(), out


class TemporalNetwork(nn.Module):
    def __init__(self, skips: str | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Temporal(inputs) for inputs in (4, WIDTH, WIDTH))
        self.head, self.skips = nn.Linear(WIDTH, 3), skips

    def forward(self, x: Tensor) -> Tensor:
        outs = []
        for block in self.blocks:
            x, out = block(x)
            outs.append(out)
        if self.skips is not None:
            x = torch.stack([*outs, x], 0).sum(0) if self.skips == "stack" else sum(outs) + x
        return self.head(x.mean(-1))


class Timed(nn.Module):
    """A residual block that adds an embedding of the time step inside its branch (diffusers' ResnetBlock2D)."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(inputs, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.time = nn.Linear(6, 16)
        self.shortcut = nn.Conv2d(inputs, 16, 1) if inputs != 16 else None

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.one(nn.functional.silu(x)) + self.time(nn.functional.silu(time))[:, :, None, None]
        skip = x if self.shortcut is None else self.shortcut(x.contiguous())
        return (skip + self.two(nn.functional.silu(h))) / 1.0


class TimedNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.embed, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(5, 6), nn.Conv2d(16, 3, 1)
        self.one, self.two = Timed(8), Timed(16)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        time = self.embed(time)
        return self.head(self.two(self.one(self.stem(x), time), time).relu())


class Joint(nn.Module):
    """One attention over two streams, whose output is added to each (Flux, SD3)."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = nn.ModuleList(nn.Linear(4, WIDTH) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.outs = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        streams = [stem(x) for stem, x in zip(self.streams, (image, text), strict=True)]
        q, k, v = torch.cat([qkv(x) for qkv, x in zip(self.qkv, streams, strict=True)], dim=1).chunk(3, dim=-1)
        attended = ((q @ k.transpose(1, 2)).softmax(-1) @ v).split([image.shape[1], text.shape[1]], dim=1)
        streams = [x + out(a) for x, out, a in zip(streams, self.outs, attended, strict=True)]
        streams = [x + mlp(x) for x, mlp in zip(streams, self.mlps, strict=True)]
        return self.head(torch.cat(streams, dim=1).mean(1))


TOKENS = (torch.randn(2, 6, 4),)
SERIES = (torch.randn(2, 4, 12),)


@pytest.mark.parametrize(
    ("make", "args", "identity", "projection"),
    [
        pytest.param(lambda: Transformer(lambda: Layer(Add())), TOKENS, 4, 0, id="add as a module"),
        pytest.param(lambda: Transformer(cls=True), TOKENS, 4, 0, id="one query"),
        pytest.param(lambda: Transformer(realformer=True), TOKENS, 4, 0, id="scores read by the next layer"),
        pytest.param(
            lambda: nn.Sequential(Inception(4), Inception(12), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(12, 3)),
            SERIES,
            0,
            2,
            id="inception",
        ),
        pytest.param(lambda: TemporalNetwork(None), SERIES, 2, 1, id="temporal"),
        pytest.param(lambda: TemporalNetwork("sum"), SERIES, 2, 1, id="temporal with a sum of branches"),
        pytest.param(lambda: TemporalNetwork("stack"), SERIES, 2, 1, id="temporal with stacked branches"),
        pytest.param(TimedNetwork, (torch.randn(2, 3, 8, 8), torch.randn(2, 5)), 1, 1, id="second input"),
        pytest.param(Joint, (torch.randn(2, 5, 4), torch.randn(2, 3, 4)), 4, 0, id="joint attention"),
    ],
)
def test_blocks_are_where_a_person_sees_them(
    make: Callable[[], nn.Module], args: tuple[Tensor, ...], identity: int, projection: int
) -> None:
    model = rewritten(make(), *args)
    assert skips(model) == Counter({kind: n for kind, n in (("identity", identity), ("projection", projection)) if n})
    assert torch.isfinite(model.train()(*args)).all()


def test_scores_that_the_next_layer_reads_are_not_skipped() -> None:
    model = rewritten(Transformer(realformer=True), *TOKENS)
    of_block = {block.name: block.ops for block in model.blocks if block.skip}
    assert of_block["layers.0"] == ("layers.0.attention.v", "layers.0.attention.matmul_1", "layers.0.attention.out")
    unskipped = {name for block in model.blocks if not block.skip for name in block.ops}
    assert unskipped >= {"layers.0.attention.q", "layers.0.attention.k", "layers.0.attention.matmul"}


def test_a_skipped_branch_adds_nothing_to_any_sum() -> None:
    model = rewritten(TemporalNetwork("stack"), *SERIES)
    selects = [node for node in model.graph.nodes if facts(node).role == "skip"]
    assert [len(select.users) for select in selects] == [2, 2, 2]  # the residual add, and the stack of all branches
    assert all(set(select.args[0].users) == {select} for select in selects)


def test_a_sum_is_recorded_from_inside_a_module_without_weights() -> None:
    model = rewritten(Transformer(lambda: Layer(Add())), *TOKENS, method="float")
    assert not [node for node in model.graph.find_nodes(op="call_module") if str(node.target).endswith("add")]


def test_activations_of_one_input_stay_one_call() -> None:
    class Cubic(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + x**3

    model = rewritten(
        nn.Sequential(nn.Linear(4, 8), Cubic(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(2, 4)
    )
    assert [node.target for node in model.graph.find_nodes(op="call_module") if node.target == "1"] == ["1"]
