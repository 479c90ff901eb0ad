"""Inputs for parts of Hugging Face models: guesses from argument names, tried until one fits."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fractrain_fx.capture.state import Snapshot

__all__ = ["guess"]

_BATCH, _LENGTH, _PADDED, _GRID, _TRIES = 2, 16, 4, 4, 24
_WIDTHS = (
    *("num_mel_bins", "n_mels", "num_mel_filters", "mel_bins", "input_feat_size", "input_feat_per_channel"),
    *("feature_size", "input_dim", "in_dim", "hidden_size", "d_model", "hidden_dim", "embed_dim"),
    *("encoder_hidden_size", "vae_latent_dim"),
)


def guess(model: nn.Module) -> dict[str, Any] | None:
    """Keyword inputs on which the model runs and gives a floating-point tensor, or ``None``."""
    for kwargs in itertools.islice(_candidates(model), _TRIES):
        try:
            with torch.no_grad(), Snapshot(model).preserved():
                model.train()(**kwargs)
        except Exception:  # another guess may fit
            continue
        return kwargs
    return None


def _candidates(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Each combination of possible values for the main input and for arguments without a default."""
    parameters = inspect.signature(model.forward).parameters
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [n for n, p in parameters.items() if p.default is inspect.Parameter.empty and p.kind not in kinds]
    main: Any = getattr(model, "main_input_name", None)
    needed += [n for n in (main if isinstance(main, list) else [main]) if n in parameters and n not in needed]
    needed += [n for n in _COMPANIONS if n in parameters and n not in needed and _COMPANIONS[n] in needed]
    sizes = _widths(model)
    makers = [_MAKERS.get(name) for name in needed]
    if not needed or any(maker is None for maker in makers):
        return
    for combination in itertools.product(*(maker(model, sizes) for maker in makers if maker is not None)):
        kwargs = dict(zip(needed, combination, strict=True))
        yield kwargs


def _configs(model: nn.Module) -> list[Any]:
    config: Any = model.config
    parts = [part for part in vars(config).values() if hasattr(part, "to_dict") and hasattr(part, "model_type")]
    return [config, *parts]


def _value(model: nn.Module, *names: str) -> Any:
    values = (getattr(config, name, None) for config in _configs(model) for name in names)
    return next((value for value in values if value is not None), None)


def _widths(model: nn.Module) -> list[int]:
    """Possible widths of a frame, the likeliest first."""
    widths = [getattr(config, name, None) for name in _WIDTHS for config in _configs(model)]
    return list(dict.fromkeys(width for width in widths if isinstance(width, int))) or [80]


def _padded(length: int) -> Tensor:
    mask = torch.ones(_BATCH, length, dtype=torch.long)
    mask[-1, -_PADDED:] = 0
    return mask


def _tokens(model: nn.Module, _: list[int]) -> list[Tensor]:
    vocabulary = _value(model, "vocab_size") or 64
    return [torch.randint(3, max(4, min(vocabulary, 512) - 8), (_BATCH, _LENGTH))]


def _frames(model: nn.Module, widths: list[int]) -> list[Tensor]:
    """Spectrograms with time first, then with time last."""
    first = [torch.randn(_BATCH, 64, width) for width in widths[:4]]
    longest = [_value(model, "max_source_positions", "max_position_embeddings")]
    lengths = [64, *(2 * n for n in longest if isinstance(n, int) and n <= 1500)]
    return first + [torch.randn(_BATCH, width, length) for width in widths[:3] for length in lengths]


def _wave(model: nn.Module, _: list[int]) -> list[Tensor]:
    channels = _value(model, "audio_channels", "channels") or 1
    channels = channels if channels in (1, 2) else 1
    return [torch.randn(_BATCH, channels, 3840), torch.randn(_BATCH, 6400), torch.randn(_BATCH, channels, 9600)]


def _hidden(model: nn.Module, widths: list[int]) -> list[Tensor]:
    """Images in pieces if the model takes a grid, otherwise states of tokens."""
    if {"grid_thw", "image_grid_thw"} & inspect.signature(model.forward).parameters.keys():
        return _patches(model, widths)
    return [torch.randn(_BATCH, 8, width) for width in widths] + [torch.randn(_BATCH, width, 8) for width in widths]


def _patches(model: nn.Module, _: list[int]) -> list[Tensor]:
    size = _value(model, "patch_size") or 14
    channels = _value(model, "in_channels", "num_channels", "in_chans") or 3
    times = _value(model, "temporal_patch_size") or 1
    rows = _BATCH * _GRID**2
    return [
        torch.randn(rows, channels * times * size**2),
        torch.randn(rows, channels * size**2),
        torch.randn(rows, channels, size, size),
    ]


def _pictures(model: nn.Module, widths: list[int]) -> list[Tensor]:
    """Whole images, or images in pieces if the model takes a grid."""
    if {"grid_thw", "image_grid_thw", "spatial_shapes", "pixel_position_ids"} & inspect.signature(
        model.forward
    ).parameters.keys():
        size, channels = _value(model, "patch_size") or 16, _value(model, "num_channels") or 3
        return [*_patches(model, widths), torch.randn(_BATCH, _GRID**2, channels * size**2)]
    side = _value(model, "image_size") or 224
    side = side if isinstance(side, int) else side[0]
    channels = _value(model, "num_channels", "in_channels", "in_chans") or 3
    flat = torch.randn(_BATCH, channels, side, side)
    return [flat, torch.randn(_BATCH, 2, channels, side, side), flat[:, None]]


def _video(model: nn.Module, _: list[int]) -> list[Tensor]:
    side = _value(model, "image_size", "crop_size") or 224
    side = side if isinstance(side, int) else side[0]
    frames = _value(model, "num_frames", "frames_per_clip") or 4
    return [torch.randn(_BATCH, n, 3, side, side) for n in dict.fromkeys((frames, 4, 16))]


def _boxes(model: nn.Module, _: list[int]) -> list[Tensor]:
    corners = torch.randint(0, 500, (_BATCH, _LENGTH, 2))
    whole = torch.cat([corners, corners + torch.randint(1, 400, corners.shape)], dim=-1)
    return [whole, whole / 1000]


def _series(model: nn.Module, _: list[int]) -> list[Tensor]:
    config: Any = model.config
    lags = max(getattr(config, "lags_sequence", None) or [0])
    length = (getattr(config, "context_length", None) or 32) + lags
    channels = getattr(config, "num_input_channels", None)
    return [torch.randn(_BATCH, length, channels)] if channels else [torch.randn(_BATCH, length)]


def _series_features(model: nn.Module, widths: list[int]) -> list[Tensor]:
    width = getattr(model.config, "num_time_features", 0)
    return [torch.randn(_BATCH, _series(model, widths)[0].shape[1], width)]


def _seen(model: nn.Module, widths: list[int]) -> list[Tensor]:
    return [torch.ones_like(x) for x in _series(model, widths)]


def _future(model: nn.Module, widths: list[int]) -> list[Tensor]:
    config: Any = model.config
    return [torch.randn(_BATCH, config.prediction_length)]


def _future_features(model: nn.Module, widths: list[int]) -> list[Tensor]:
    config: Any = model.config
    return [torch.randn(_BATCH, config.prediction_length, getattr(config, "num_time_features", 0))]


def _grid(model: nn.Module, _: list[int]) -> list[Tensor]:
    return [torch.tensor([[1, _GRID, _GRID]] * _BATCH), torch.tensor([[_GRID, _GRID]] * _BATCH)]


_MAKERS: dict[str, Callable[[nn.Module, list[int]], list[Any]]] = {
    "input_ids": _tokens,
    "decoder_input_ids": _tokens,
    "qformer_input_ids": _tokens,
    "attention_mask": lambda *_: [_padded(_LENGTH)],
    "input_features": _frames,
    "input_features_mask": lambda *_: [_padded(64), _padded(64).bool()],
    "audio_mel": _frames,
    "audio_mel_mask": lambda *_: [_padded(64) == 0],
    "input_values": _wave,
    "padding_mask": lambda *_: [_padded(3840)],
    "latents": _hidden,
    "hidden_states": _hidden,
    "inputs_embeds": _hidden,
    "query_embeds": _hidden,
    "grid_thw": _grid,
    "image_grid_thw": _grid,
    "merge_sizes": lambda *_: [torch.tensor([1] * _BATCH), torch.tensor([2] * _BATCH)],
    "spatial_shapes": lambda *_: [torch.tensor([[_GRID, _GRID]] * _BATCH)],
    "pixel_attention_mask": lambda *_: [torch.ones(_BATCH, _GRID**2, dtype=torch.long)],
    "pixel_position_ids": lambda *_: [
        torch.stack(torch.meshgrid(torch.arange(_GRID), torch.arange(_GRID), indexing="xy"), -1)
        .reshape(1, -1, 2)
        .repeat(_BATCH, 1, 1)
    ],
    "pixel_values": _pictures,
    "pixel_values_videos": _video,
    "bbox": _boxes,
    "past_values": _series,
    "past_time_features": _series_features,
    "past_observed_mask": _seen,
    "future_values": _future,
    "future_time_features": _future_features,
}
# Arguments that a model needs besides another one although they have a default.
_COMPANIONS = {
    "bbox": "input_ids",
    "attention_mask": "input_ids",
    "future_values": "past_values",
    "future_time_features": "past_values",
    "input_features_mask": "input_features",
    "decoder_input_ids": "input_features",
}
