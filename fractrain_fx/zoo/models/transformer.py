"""Transformer-base language model (fairseq's ``transformer_lm`` base), as the paper trains it on WikiText-103."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["TransformerLM", "transformer_base"]


class SelfAttention(nn.Module):
    """Causal multi-head attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Float[Tensor, "batch length width"]) -> Float[Tensor, "batch length width"]:
        q, k, v = (self._split(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.out_proj(attended.transpose(1, 2).flatten(2))
        return x

    def _split(self, x: Tensor) -> Float[Tensor, "batch heads length width"]:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


class Layer(nn.Module):
    """Attention, then two linear layers with a ReLU; each is added to its input and reads it normalised."""

    def __init__(self, width: int, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "batch length width"]) -> Float[Tensor, "batch length width"]:
        x = x + self.dropout(self.attention(self.norm1(x)))
        x = x + self.dropout(self.fc2(F.relu(self.fc1(self.norm2(x)))))
        return x


class TransformerLM(nn.Module):
    """Token ids in, logits of each next token out; the head has the weight of the embedding.

    Args:
        vocab_size: number of tokens.
        width: width of the embedding and of every residual.
        hidden: hidden width of the two linear layers.
        layers: number of layers.
        heads: attention heads a layer.
        dropout: probability, after the embedding and after each branch.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        width: int = 512,
        hidden: int = 2048,
        layers: int = 6,
        heads: int = 8,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(width, hidden, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=width**-0.5)
        for layer in self.layers.modules():
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward(self, tokens: Int[Tensor, "batch length"]) -> Float[Tensor, "batch length vocab"]:
        x = self.embed(tokens)
        # The embedding starts small for the tied head, and is scaled up here to the size of the positions.
        x = x * math.sqrt(self.embed.embedding_dim) + _positions(tokens.shape[1], self.embed.weight)
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _positions(length: int, like: Tensor) -> Float[Tensor, "length width"]:
    """Sines, then cosines, of wavelengths from 2 pi to 20,000 pi (Vaswani et al., 2017, section 3.5)."""
    half = like.shape[1] // 2
    frequency = torch.exp(torch.arange(half, device=like.device) * (-math.log(10_000.0) / (half - 1)))
    angle = torch.arange(length, device=like.device)[:, None] * frequency
    return torch.cat((angle.sin(), angle.cos()), 1).to(like.dtype)


def transformer_base(vocab_size: int) -> TransformerLM:
    """18.87 million MACs a token in its linear layers, without the head."""
    return TransformerLM(vocab_size)
