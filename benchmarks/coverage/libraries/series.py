"""Time series: classification, forecasting, and temporal convolutions."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.coverage.libraries.entry import Entry, Module

__all__ = ["ENTRIES"]

_encoders = Module("pytorch_forecasting.data.encoders")
_forecasting = Module("pytorch_forecasting.models")
_losses = Module("pytorch_forecasting.metrics")
_neural = Module("neuralforecast.models")
_tcn = Module("pytorch_tcn")
_tsai = Module("tsai.models.all")

_CHANNELS, _CLASSES, _LENGTH, _HORIZON = 3, 4, 48, 12
_TRAINING: dict[str, Any] = {"max_steps": 1, "accelerator": "cpu", "logger": False}


def _classifier(name: str, **options: Any) -> Entry:
    return Entry(
        "tsai",
        name,
        lambda: getattr(_tsai, name)(_CHANNELS, _CLASSES, **options),
        lambda: (torch.randn(2, _CHANNELS, _LENGTH),),
    )


def _window(series: int = 1) -> dict[str, Any]:
    """The batch of neuralforecast's loaders for models without further variables."""
    return {
        "insample_y": torch.randn(2, _LENGTH, series),
        "insample_mask": torch.ones(2, _LENGTH, series),
        "futr_exog": None,
        "hist_exog": None,
        "stat_exog": None,
    }


def _forecaster(name: str, series: int = 1, **options: Any) -> Entry:
    def make() -> nn.Module:
        many = {"n_series": series} if series > 1 else {}
        made: nn.Module = getattr(_neural, name)(h=_HORIZON, input_size=_LENGTH, **many, **options, **_TRAINING)
        return made

    return Entry("neuralforecast", name, make, lambda: (_window(series),))


def _encoded() -> tuple[Any, ...]:
    """The batch of pytorch-forecasting's loaders for models of one series without further variables."""
    batch = {
        "encoder_cont": torch.randn(2, _LENGTH, 1),
        "decoder_cont": torch.randn(2, _HORIZON, 1),
        "encoder_lengths": torch.full((2,), _LENGTH),
        "decoder_lengths": torch.full((2,), _HORIZON),
        "target_scale": torch.tensor([[0.0, 1.0], [0.5, 2.0]]),
    }
    return (batch,)


_PAIR = [[32, 32]] * 3

ENTRIES = (
    _classifier("InceptionTime", nf=8),
    _classifier("XceptionTime", nf=4),
    _classifier("PatchTST", seq_len=_LENGTH, pred_dim=_HORIZON, d_model=32, d_ff=64, n_heads=2, patch_len=8, stride=4),
    _classifier("TST", seq_len=_LENGTH, d_model=32, n_heads=2, d_ff=64, n_layers=2),
    _classifier("TSiTPlus", seq_len=_LENGTH, d_model=32, n_heads=2, depth=2, verbose=False),
    _classifier("LSTM_FCN", seq_len=_LENGTH, hidden_size=16, conv_layers=[16, 32, 16]),
    _classifier("ResCNN"),
    _classifier("XCM", seq_len=_LENGTH, nf=8),
    _classifier("OmniScaleCNN", seq_len=_LENGTH, layers=[64, 256]),
    _classifier("TSPerceiver", seq_len=_LENGTH, n_latents=8, d_latent=32, n_layers=2, self_n_heads=2),
    _classifier("ConvTranPlus", seq_len=_LENGTH, dim_ff=32),
    _forecaster("NHITS", mlp_units=_PAIR),
    _forecaster("NBEATS", mlp_units=_PAIR),
    _forecaster("DLinear"),
    _forecaster("PatchTST", hidden_size=32, n_heads=2, encoder_layers=2, linear_hidden_size=64, patch_len=8, stride=4),
    _forecaster("TCN", encoder_hidden_size=16, decoder_hidden_size=16, kernel_size=2),
    _forecaster("TFT", hidden_size=16, n_head=2),
    _forecaster("TiDE", hidden_size=32, decoder_output_dim=8, temporal_decoder_dim=16),
    _forecaster("iTransformer", series=3, hidden_size=32, n_heads=2, d_ff=64),
    _forecaster("TSMixer", series=3, ff_dim=16, dropout=0.1),
    _forecaster("TimesNet", hidden_size=16, conv_hidden_size=16, top_k=2),
    Entry(
        "pytorch_forecasting",
        "NBeats",
        lambda: _forecasting.NBeats(
            context_length=_LENGTH,
            prediction_length=_HORIZON,
            widths=[32, 64],
            num_blocks=[1, 1],
            num_block_layers=[2, 2],
            stack_types=["trend", "seasonality"],
            expansion_coefficient_lengths=[3, 7],
            sharing=[True, True],
            loss=_losses.MAE(),
            output_transformer=_encoders.TorchNormalizer(),
        ),
        _encoded,
    ),
    Entry(
        "pytorch-tcn",
        "TCN",
        lambda: _tcn.TCN(8, [16, 16], kernel_size=3, dropout=0.1, use_skip_connections=True),
        lambda: (torch.randn(2, 8, _LENGTH),),
    ),
    Entry(
        "pytorch-tcn",
        "TCN, gated, batch norm",
        lambda: _tcn.TCN(8, [16, 16], kernel_size=3, use_norm="batch_norm", use_gate=True, input_shape="NLC"),
        lambda: (torch.randn(2, _LENGTH, 8),),
    ),
)
