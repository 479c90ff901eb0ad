"""Real models, small enough to run in a test: a builder and one batch of inputs for each."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_map_only

__all__ = [
    "COMPILES_EXPERTS",
    "HOME_MADE",
    "HUGGING_FACE",
    "TIMM",
    "Case",
    "ScaledGradient",
    "build",
    "marks",
    "some_long",
    "thinned",
]


@dataclass(frozen=True)
class Case:
    """A model with the arguments of one training call."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None

    @property
    def keywords(self) -> dict[str, Any]:
        return self.kwargs or {}

    def on(self, moved: Callable[[Tensor], Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with each tensor as ``moved`` makes it."""
        args, kwargs = tree_map_only(Tensor, moved, (self.args, self.keywords))
        return args, kwargs


class IfOnShape(nn.Module):
    """Takes another path for small images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.large = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.small = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = self.large(x) if x.shape[-1] > 16 else self.small(x)
        return self.head(x.relu().mean((2, 3)))


class DictOutputs(nn.Module):
    """Returns a dictionary of tensors, one of them nested."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.head, self.aux = nn.Linear(16, 4), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        features = self.body(x)
        return {"logits": self.head(features), "more": {"aux": self.aux(features)}}


class TiedWeights(nn.Module):
    """A small language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.mlp(x)
        return self.head(x)


class Attention(nn.Module):
    """Pre-norm attention with torch's own multi-head module."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(12, 16)
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x)
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return self.head(x.mean(1))


def _sequential() -> Case:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
    model.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)])
    return Case(model, (torch.randn(2, 3, 12, 12),))


def _timm(name: str, size: int = 64, **options: Any) -> Callable[[], Case]:
    def make() -> Case:
        import timm

        return Case(timm.create_model(name, num_classes=10, **options), (torch.randn(2, 3, size, size),))

    return make


def _hugging_face(kind: str, head: str, **sizes: Any) -> Callable[[], Case]:
    def make() -> Case:
        import transformers

        config = transformers.AutoConfig.for_model(kind, **sizes)
        model = getattr(transformers, head).from_config(config)
        if kind == "vit":
            return Case(model, (), {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])})
        tokens = torch.randint(3, 60, (2, 12))
        mask = torch.ones_like(tokens)
        mask[1, 9:] = 0
        kwargs: dict[str, Any] = {"input_ids": tokens, "attention_mask": mask}
        kwargs["labels"] = tokens.masked_fill(mask == 0, -100)
        if head == "AutoModelForSequenceClassification":
            kwargs["labels"] = torch.tensor([0, 1])
        if kind != "bert":
            kwargs["use_cache"] = False
        return Case(model, (), kwargs)

    return make


TIMM: dict[str, Callable[[], Case]] = {
    # Models have fewer layers than their names promise, of every kind of block, and Swin is narrower.
    "resnet18": _timm("resnet18", layers=(2, 1, 1, 1)),
    "resnet50": _timm("resnet50", layers=(2, 1, 1, 1)),
    "mobilenetv2_100": _timm("mobilenetv2_100", drop_path_rate=0.1),
    "efficientnet_b0": _timm("efficientnet_b0", drop_path_rate=0.1),
    "vit_tiny_patch16_224": _timm("vit_tiny_patch16_224", img_size=64, depth=4, drop_path_rate=0.1),
    "swin_tiny_patch4_window7_224": _timm(
        "swin_tiny_patch4_window7_224",
        112,
        **{"img_size": 112, "depths": (2, 2, 2, 2), "embed_dim": 24, "num_heads": (1, 2, 4, 8)},
        drop_path_rate=0.1,
    ),
    "convnext_atto": _timm("convnext_atto", depths=(1, 1, 2, 1), drop_path_rate=0.1),
    "densenet121": _timm("densenet121", block_config=(3, 3, 3, 3)),
    "test_nfnet": _timm("test_nfnet"),
    "levit_128s": _timm("levit_128s", img_size=64, depth=(1, 1, 1)),
}

_TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_TEXT = {**_TINY, "vocab_size": 64}

HUGGING_FACE: dict[str, Callable[[], Case]] = {
    "bert": _hugging_face("bert", "AutoModelForSequenceClassification", **_TEXT),
    "gpt2": _hugging_face(
        "gpt2",
        "AutoModelForCausalLM",
        vocab_size=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=32,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "llama": _hugging_face("llama", "AutoModelForCausalLM", num_key_value_heads=2, **_TEXT),
    "t5": _hugging_face(
        "t5",
        "AutoModelForSeq2SeqLM",
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
    ),
    "bart": _hugging_face(
        "bart",
        "AutoModelForSeq2SeqLM",
        vocab_size=64,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        decoder_start_token_id=2,
        forced_eos_token_id=2,
    ),
    "vit": _hugging_face("vit", "AutoModelForImageClassification", image_size=32, patch_size=8, **_TINY),
    "mixtral": _hugging_face("mixtral", "AutoModelForCausalLM", num_key_value_heads=2, num_local_experts=4, **_TEXT),
}


def _torchvision() -> Case:
    import torchvision

    return Case(torchvision.models.resnet18(num_classes=10), (torch.randn(2, 3, 64, 64),))


HOME_MADE: dict[str, Callable[[], Case]] = {
    "torchvision_resnet18": _torchvision,
    "sequential": _sequential,
    "if_on_shape": lambda: Case(IfOnShape(), (torch.randn(2, 3, 24, 24),)),
    "dict_outputs": lambda: Case(DictOutputs(), (torch.randn(2, 8),)),
    "tied_weights": lambda: Case(TiedWeights(), (torch.randint(0, 32, (2, 6)),)),
    "multihead_attention": lambda: Case(Attention(), (torch.randn(2, 5, 12),)),
}


def build(name: str) -> Case:
    """The model of that name with one batch, from a fixed seed."""
    torch.manual_seed(0)
    return {**TIMM, **HUGGING_FACE, **HOME_MADE}[name]()


# Before 2.15 torch compiles no product of experts in float32, with or without this package.
COMPILES_EXPERTS = TorchVersion(torch.__version__) >= "2.15"


def some_long(names: Iterable[str], *long: str, slow: Container[str] = ()) -> list[Any]:
    """Parameters for a test; those named ``long`` or ``slow`` show little more, and run with the tests of that mark."""
    return [pytest.param(name, marks=marks(name, long, slow)) for name in names]


def thinned(cases: Iterable[Any], every: int, mark: pytest.MarkDecorator = pytest.mark.long) -> list[Any]:
    """Parameters of which every n-th runs with all tests. The others, which try the same on more, get the mark."""
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*each, marks=[mark] * (place % every > 0)) for place, each in enumerate(values)]


def marks(case: object, long: Container[Any], slow: Container[Any]) -> list[pytest.MarkDecorator]:
    """The mark of one case of a sweep; none for a case that runs with all tests."""
    return [pytest.mark.long] if case in long else [pytest.mark.slow] if case in slow else []


class ScaledGradient(torch.autograd.Function):
    """Gives its input, and multiplies the gradient by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.factor * gradient, None
