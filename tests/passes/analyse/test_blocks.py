"""Blocks as counted by hand in the papers and sources of these models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx.passes import Block
from tests.build import rewritten
from tests.models import Case, build, thinned


def blocks(case: Case) -> list[Block]:
    return rewritten(case, method="pfq").blocks


@pytest.mark.parametrize(
    ("name", "identity", "projection"),
    thinned(
        [
            ("resnet18", 2, 3),
            ("resnet50", 1, 4),
            ("mobilenetv2_100", 10, 0),
            ("efficientnet_b0", 9, 0),
            ("vit_tiny_patch16_224", 8, 0),
            ("swin_tiny_patch4_window7_224", 16, 0),
            ("convnext_atto", 5, 0),
            ("densenet121", 0, 0),
            ("bert", 4, 0),
            ("gpt2", 4, 0),
            ("llama", 4, 0),
            ("t5", 10, 0),
            ("bart", 10, 0),
            ("mixtral", 4, 0),
        ],
        3,
    ),
)
def test_residual_blocks_are_found(name: str, identity: int, projection: int) -> None:
    found = blocks(build(name))
    assert sum(block.skip == "identity" for block in found) == identity
    assert sum(block.skip == "projection" for block in found) == projection


def test_densenet_layers_are_blocks_without_a_skip_path() -> None:
    layers = [block for block in blocks(build("densenet121")) if "denselayer" in block.name]
    assert len(layers) == 12
    assert all(block.skip is None and len(block.ops) == 2 for block in layers)


def test_bottlenecks_of_mobilenet_without_a_residual_are_blocks_of_their_own() -> None:
    found = {block.name: block for block in blocks(build("mobilenetv2_100"))}
    assert found["blocks.1.0"].skip is None
    assert found["blocks.1.0"].ops == ("blocks.1.0.conv_pw", "blocks.1.0.conv_dw", "blocks.1.0.conv_pwl")


def test_each_layer_of_a_plain_sequence_is_a_block() -> None:
    assert [block.name for block in blocks(build("sequential"))] == ["0", "3", "7"]


class Parallel(nn.Module):
    """Attention and MLP side by side, as in GPT-J: one block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.norm, self.one, self.two = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        y = self.norm(x)
        return self.head(self.one(y) + self.two(y) + x)


class Leaking(nn.Module):
    """The first half of the branch is read elsewhere too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two, self.head = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        inner = self.one(x).relu()
        return self.head(x + self.two(inner)) * inner


def test_parallel_branches_are_one_block_and_both_can_be_skipped() -> None:
    found = blocks(Case(Parallel(), (torch.randint(0, 16, (2, 5)),)))
    residual = [block for block in found if block.skip]
    assert len(residual) == 1
    assert residual[0].ops == ("one", "two")
    assert len(residual[0].branches) == 2


def test_only_the_part_of_a_branch_that_nothing_else_reads_can_be_skipped() -> None:
    residual = [block for block in blocks(Case(Leaking(), (torch.randn(2, 8),))) if block.skip]
    assert [block.ops for block in residual] == [("two",)]


def test_a_branch_that_is_read_elsewhere_as_a_whole_is_no_residual_block() -> None:
    class Whole(Leaking):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            inner = self.two(self.one(x).relu())
            return self.head(x + inner) * inner

    assert not [block for block in blocks(Case(Whole(), (torch.randn(2, 8),))) if block.skip]
