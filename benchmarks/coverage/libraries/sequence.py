"""Transformers and state spaces over tokens and feature vectors, and heads trained on top of them."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.coverage.libraries.entry import Entry, Module, features, mask, tokens

__all__ = ["ENTRIES"]

_conformer = Module("conformer")
_crf = Module("torchcrf")
_entmax = Module("entmax")
_linear = Module("linear_attention_transformer")
_linformer = Module("linformer")
_local = Module("local_attention")
_mamba = Module("mambapy.mamba")
_metric = Module("pytorch_metric_learning.losses")
_perceiver = Module("perceiver_pytorch")
_performer = Module("performer_pytorch")
_pooling = Module("sentence_transformers.sentence_transformer.modules")
_quantizers = Module("vector_quantize_pytorch")
_reformer = Module("reformer_pytorch")
_sentence = Module("sentence_transformers")
_transformers = Module("transformers")
_x = Module("x_transformers")


def _language(layers: str, **options: object) -> nn.Module:
    """A language model of x-transformers."""
    attention = getattr(_x, layers)(dim=32, depth=2, heads=2, attn_dim_head=16, **options)
    made: nn.Module = _x.TransformerWrapper(num_tokens=64, max_seq_len=32, attn_layers=attention)
    return made


def _autoregressive() -> nn.Module:
    made: nn.Module = _x.AutoregressiveWrapper(_language("Decoder", rotary_pos_emb=True))
    return made


def _encoder() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))


class _Tagger(nn.Module):
    """An encoder with a CRF, as in pytorch-crf's documentation: the loss is the negative log-likelihood."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.encoder = nn.LSTM(32, 16, bidirectional=True, batch_first=True)
        self.head = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 5))
        self.crf = _crf.CRF(5, batch_first=True)

    def forward(self, ids: torch.Tensor, tags: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        emissions = self.head(self.encoder(self.embedding(ids))[0])
        loss: torch.Tensor = -self.crf(emissions, tags, mask=mask, reduction="mean")
        return loss


class _SparseClassifier(nn.Module):
    """Attention pooling with entmax's sparse weights, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.head = nn.Linear(32, 1), nn.Linear(32, 5)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        self.loss = _entmax.Entmax15Loss()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        weights = _entmax.entmax15(self.score(x), dim=1)
        loss: torch.Tensor = self.loss(self.head((weights * self.body(x).relu()).sum(1)), labels)
        return loss


class _Embedder(nn.Module):
    """Vectors with a loss of pytorch-metric-learning."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.body, self.loss = _encoder(), loss

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.loss(self.body(x), labels)
        return loss


def _sentences() -> nn.Module:
    config = _transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    transformer = _SentenceBert(_transformers.BertModel(config))
    made: nn.Module = _sentence.SentenceTransformer(
        modules=[transformer, _pooling.Pooling(32, "mean"), _pooling.Normalize()], device="cpu"
    )
    return made


class _SentenceBert(nn.Module):
    """An encoder that reads and returns dictionaries, like sentence-transformers' modules, without a tokenizer."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        output = self.encoder(input_ids=features["input_ids"], attention_mask=features["attention_mask"])
        return {**features, "token_embeddings": output.last_hidden_state}


ENTRIES = (
    Entry("x-transformers", "Decoder", lambda: _language("Decoder"), lambda: {"x": tokens(), "mask": mask()}),
    Entry("x-transformers", "AutoregressiveWrapper", _autoregressive, lambda: (tokens(),)),
    Entry(
        "x-transformers",
        "Encoder with ALiBi",
        lambda: _language("Encoder", alibi_pos_bias=True, alibi_num_heads=1, ff_glu=True, use_rmsnorm=True),
        lambda: {"x": tokens(), "mask": mask()},
    ),
    Entry(
        "x-transformers",
        "ContinuousTransformerWrapper",
        lambda: _x.ContinuousTransformerWrapper(
            dim_in=8, dim_out=4, max_seq_len=32, attn_layers=_x.Encoder(dim=32, depth=2, heads=2)
        ),
        lambda: {"x": features(16, 8), "mask": mask()},
    ),
    Entry(
        "x-transformers",
        "ViTransformerWrapper",
        lambda: _x.ViTransformerWrapper(
            image_size=64, patch_size=16, num_classes=10, attn_layers=_x.Encoder(dim=32, depth=2, heads=2)
        ),
        lambda: (torch.randn(2, 3, 64, 64),),
    ),
    Entry(
        "x-transformers",
        "XTransformer",
        lambda: _x.XTransformer(
            dim=32,
            **{"enc_num_tokens": 64, "enc_depth": 1, "enc_heads": 2, "enc_max_seq_len": 32},
            **{"dec_num_tokens": 64, "dec_depth": 1, "dec_heads": 2, "dec_max_seq_len": 32},
        ),
        lambda: {"src": tokens(), "tgt": tokens(12), "mask": mask()},
    ),
    Entry(
        "performer-pytorch",
        "PerformerLM",
        lambda: _performer.PerformerLM(num_tokens=64, max_seq_len=32, dim=32, depth=2, heads=2, dim_head=16),
        lambda: {"x": tokens(), "mask": mask()},
    ),
    Entry(
        "performer-pytorch",
        "Performer",
        lambda: _performer.Performer(dim=32, depth=2, heads=2, dim_head=16, generalized_attention=True),
        lambda: (features(),),
    ),
    Entry(
        "reformer-pytorch",
        "ReformerLM",
        lambda: _reformer.ReformerLM(64, 32, 2, max_seq_len=64, heads=2, dim_head=16, bucket_size=8, causal=True),
        lambda: (tokens(32),),
    ),
    Entry(
        "linformer",
        "LinformerLM",
        lambda: _linformer.LinformerLM(64, 32, seq_len=16, depth=2, k=8, heads=2),
        lambda: (tokens(),),
    ),
    Entry(
        "linear-attention-transformer",
        "LinearAttentionTransformerLM",
        lambda: _linear.LinearAttentionTransformerLM(
            64, 32, 2, max_seq_len=64, heads=2, dim_head=16, causal=True, n_local_attn_heads=1, local_attn_window_size=8
        ),
        lambda: (tokens(32),),
    ),
    Entry(
        "local-attention",
        "LocalTransformer",
        lambda: _local.LocalTransformer(
            num_tokens=64, max_seq_len=64, dim=32, depth=2, heads=2, dim_head=16, local_attn_window_size=8
        ),
        lambda: {"x": tokens(32), "return_loss": True},
    ),
    Entry(
        "perceiver-pytorch",
        "Perceiver",
        lambda: _perceiver.Perceiver(
            num_freq_bands=4, depth=2, max_freq=8.0, num_latents=8, latent_dim=32, latent_heads=2, num_classes=10
        ),
        lambda: (torch.randn(2, 16, 16, 3),),
    ),
    Entry(
        "perceiver-pytorch",
        "PerceiverIO",
        lambda: _perceiver.PerceiverIO(
            depth=2, dim=32, queries_dim=16, logits_dim=10, num_latents=8, latent_dim=32, latent_heads=2
        ),
        lambda: {"data": features(), "mask": mask(), "queries": torch.randn(2, 6, 16)},
    ),
    Entry(
        "conformer",
        "Conformer",
        lambda: _conformer.Conformer(32, depth=2, dim_head=16, heads=2, conv_kernel_size=7, ff_dropout=0.1),
        lambda: (features(24, 32),),
    ),
    Entry(
        "mambapy",
        "Mamba",
        lambda: _mamba.Mamba(_mamba.MambaConfig(d_model=32, n_layers=2, d_state=4)),
        lambda: (features(),),
    ),
    Entry(
        "mambapy",
        "Mamba, sequential scan",
        lambda: _mamba.Mamba(_mamba.MambaConfig(d_model=32, n_layers=1, d_state=4, pscan=False)),
        lambda: (features(8),),
    ),
    Entry(
        "sentence-transformers",
        "SentenceTransformer",
        _sentences,
        lambda: ({"input_ids": tokens(), "attention_mask": mask().long()},),
    ),
    Entry("pytorch-crf", "LSTM-CRF", _Tagger, lambda: (tokens(), torch.randint(0, 5, (2, 16)), mask())),
    Entry("entmax", "attention pooling", _SparseClassifier, lambda: (features(), torch.tensor([1, 3]))),
    Entry(
        "pytorch-metric-learning",
        "TripletMarginLoss",
        lambda: _Embedder(_metric.TripletMarginLoss()),
        lambda: (torch.randn(8, 32), torch.arange(8) // 2),
    ),
    Entry(
        "pytorch-metric-learning",
        "ArcFaceLoss",
        lambda: _Embedder(_metric.ArcFaceLoss(num_classes=4, embedding_size=16)),
        lambda: (torch.randn(8, 32), torch.arange(8) // 2),
    ),
    Entry(
        "vector-quantize-pytorch",
        "VectorQuantize",
        lambda: nn.Sequential(_encoder(), _quantizers.VectorQuantize(16, 32)),
        lambda: (features(),),
    ),
    Entry(
        "vector-quantize-pytorch",
        "ResidualFSQ",
        lambda: nn.Sequential(_encoder(), _quantizers.ResidualFSQ(dim=16, levels=[8, 5, 5], num_quantizers=2)),
        lambda: (features(),),
    ),
)
