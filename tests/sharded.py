"""Small models, and functions that run in several processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

__all__ = ["EncoderDecoder", "PostNorm", "Text", "together", "whole"]


class Text(nn.Module):
    """Residual layers between an embedding and a head with its weights; the model itself holds the positions."""

    def __init__(self, width: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(12, width), nn.Parameter(torch.zeros(6, width))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class PostNorm(nn.Module):
    """Blocks that end with a norm, whose output the next block multiplies first."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(3))
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(x + layer(x))
        return self.head(x)


class EncoderDecoder(nn.Module):
    """Each block of the second half reads what the norm behind the first half gives."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head, self.norm = nn.Linear(8, 8), nn.Linear(8, 4), nn.LayerNorm(8)
        self.encoder = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(2))
        self.decoder = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(2))
        self.cross = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        start = encoded = self.stem(x)
        for layer in self.encoder:
            encoded = encoded + layer(encoded)
        encoded, x = self.norm(encoded), start
        for layer, cross in zip(self.decoder, self.cross, strict=True):
            x = x + layer(x)
            x = x + cross(encoded)
        return self.head(x)


def whole(model: nn.Module) -> dict[str, Tensor]:
    """A state whose sharded tensors are gathered."""
    return {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in model.state_dict().items()}


def together(function: Callable[..., None], folder: Path, ranks: int, *given: Any) -> None:
    """Run a function in several processes, forked from one that has imported all they need."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["fractrain_fx.distributed", "torch.distributed.tensor", "tests.sharded"])
    mp.start_processes(function, (str(folder), ranks, *given), nprocs=ranks, start_method="forkserver")
