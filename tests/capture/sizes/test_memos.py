"""Libraries that keep results by size lose no size: what einops reshapes runs at every batch size and length."""

from __future__ import annotations

import functools
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fractrain_fx.capture import Recording, record


def holds(model: nn.Module, recording: Recording, *sizes: tuple[int, ...]) -> None:
    """The recording keeps nothing whole, and gives the model's numbers on inputs of these sizes."""
    assert not recording.leaves and not recording.fixed_batch
    for size in sizes:
        x = torch.randn(*size)
        model.eval(), recording.eval.eval()
        assert torch.equal(recording.eval.forward(x), model(x)), size


@functools.lru_cache
def halves(length: int, parts: int = 2) -> tuple[int, int]:
    return length // parts, length - length // parts


class Halves(nn.Module):
    """Sizes through a memoized function, method and static method."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 2)

    @functools.cache  # noqa: B019 - that it keeps the module is no matter here
    def doubled(self, length: int) -> int:
        return 2 * length

    @staticmethod
    @functools.cache
    def padding(length: int) -> int:
        return length % 4

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.split(halves(x.shape[1]), dim=1)
        x = torch.cat([self.first(a), self.second(b)], dim=1)
        x = F.pad(x, (0, 0, 0, self.padding(x.shape[1]))).mean(1, keepdim=True)
        return self.head(x.expand(-1, self.doubled(b.shape[1]), -1))


def test_what_was_computed_for_plain_sizes_before_is_computed_anew() -> None:
    model, sizes = Halves(), [(2, 6, 4), (5, 6, 4), (3, 9, 4)]
    for size in sizes:
        model(torch.randn(*size))  # the caches now hold plain numbers for all of them
    recording = record(model, (torch.randn(2, 6, 4),))
    assert "floordiv" in recording.train.code
    holds(model, recording, *sizes)


def test_no_size_of_a_recording_stays_in_a_cache() -> None:
    halves.cache_clear()
    model = Halves()
    record(model, (torch.randn(2, 6, 4),), check=False)
    assert halves.cache_info().currsize <= 1  # the model's own run, for what it makes at its first call
    assert all(type(size) is int for size in halves(6))
    assert isinstance(vars(sys.modules[__name__])["halves"], functools._lru_cache_wrapper)


def test_a_memoized_function_is_found_in_a_library_that_changed_since_the_last_recording(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = ModuleType("library")
    monkeypatch.setitem(sys.modules, "library", library)

    class Repeats(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.repeat(1, vars(library)["double"](x.shape[1]))

    record(nn.Linear(4, 2), (torch.randn(2, 4),))  # reads the library's names
    vars(library)["double"] = functools.cache(lambda length: 2 * length)
    holds(Repeats(), record(Repeats(), (torch.randn(2, 4),)), (2, 4), (3, 5))


def test_what_a_library_puts_among_the_loaded_modules_need_not_be_hashable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "odd", SimpleNamespace(halves=halves))
    recording = record(Halves(), (torch.randn(2, 6, 4),))
    assert "floordiv" in recording.train.code


class Attention(nn.Module):
    """Every kind of call that einops has."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        from einops.layers.torch import EinMix, Rearrange, Reduce

        self.heads = heads
        self.patches = Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=2, q=2)
        self.embed, self.qkv, self.out = nn.Linear(12, width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.mix = EinMix("b n d -> b n e", weight_shape="d e", d=width, e=width)
        self.mean = Reduce("b (n two) d -> b n d", "mean", two=2)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        from einops import einsum, pack, rearrange, reduce, repeat, unpack

        x = self.embed(self.patches(x))
        token = repeat(self.token, "1 1 d -> b 1 d", b=x.shape[0])
        x, sizes = pack([token, x], "b * d")
        q, k, v = rearrange(self.qkv(x), "b n (three h d) -> three b h n d", three=3, h=self.heads)
        weights = einsum(q, k, "b h i d, b h j d -> b h i j").softmax(-1)
        x = x + self.out(rearrange(einsum(weights, v, "b h i j, b h j d -> b h i d"), "b h n d -> b n (h d)"))
        token, x = unpack(x + self.mix(x), sizes, "b * d")
        return self.head(reduce(self.mean(x), "b n d -> b d", "max") + rearrange(token, "b 1 d -> b d"))


def test_einops_runs_at_other_batch_sizes_and_lengths() -> None:
    pytest.importorskip("einops")
    model, sizes = Attention(), [(2, 3, 8, 8), (1, 3, 8, 8), (5, 3, 8, 8), (3, 3, 12, 8)]
    for size in sizes:
        model(torch.randn(*size))
    holds(model, record(model, (torch.randn(2, 3, 8, 8),)), *sizes)
