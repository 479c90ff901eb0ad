"""One training batch for a Hugging Face model: the inputs that fractrain_fx finds, and text around images."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from benchmarks.coverage.hf_guess import guess
from fractrain_fx.capture.inputs.examples import example_inputs
from fractrain_fx.capture.state import Snapshot

__all__ = ["inputs_for"]

_TEXT, _PADDING, _GRID, _IGNORED, _WAVE = 10, 3, 4, -100, 6400


def inputs_for(model: nn.Module, labels: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keyword inputs, and a note that describes them.

    A model whose text has places for images gets images if they can be made, and otherwise text alone.

    Raises:
        InputError: the inputs of the model are unknown.
    """
    try:
        _, kwargs = example_inputs(model, labels=labels)
        _run(model, _shorter(kwargs))
        kwargs = _shorter(kwargs)
    except Exception as error:  # fractrain_fx finds no inputs, or none that this model takes
        image_token = _image_token(model)
        if image_token is not None and "input_ids" in inspect.signature(model.forward).parameters:
            kwargs = _with_images(model, image_token, labels)
        else:
            guessed = None if labels else guess(model)
            if guessed is None:
                raise error from None
            kwargs = guessed
    return kwargs, {"inputs": sorted(kwargs)}


def _shorter(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Waves of 0.4 s instead of one second: 19 frames."""
    length = kwargs["input_values"].shape[1] if "input_values" in kwargs and kwargs["input_values"].ndim == 2 else 0
    if length <= _WAVE:
        return kwargs
    return {name: x[:, -_WAVE:] if x.ndim == 2 and x.shape[1] == length else x for name, x in kwargs.items()}


def _run(model: nn.Module, kwargs: dict[str, Any]) -> None:
    with torch.no_grad(), Snapshot(model).preserved():
        model.train()(**kwargs)


def _image_token(model: nn.Module) -> int | None:
    config: Any = model.config
    token = getattr(config, "image_token_id", None)
    return getattr(config, "image_token_index", None) if token is None else token


def _with_images(model: nn.Module, image_token: int, labels: bool) -> dict[str, Any]:
    parameters = inspect.signature(model.forward).parameters
    makers: list[Callable[[nn.Module], tuple[dict[str, Tensor], int]]] = []
    if "image_grid_thw" in parameters:
        makers.append(_patches)
    if "pixel_values" in parameters:
        makers.append(_pictures)
    for make in makers:
        try:
            pictures, places = make(model)
            kwargs = _text(model, image_token, places, labels) | pictures
            with torch.no_grad():
                model(**kwargs)
            return kwargs
        except Exception:  # its images have a form that only its processor knows
            continue
    return _text(model, image_token, 0, labels)


def _pictures(model: nn.Module) -> tuple[dict[str, Tensor], int]:
    """An image for each sample, and the number of text tokens for it."""
    config: Any = getattr(model.config, "vision_config", model.config)
    side = getattr(config, "image_size", 224)
    height, width = side if isinstance(side, list | tuple) else (side, side)
    pixels = torch.randn(2, getattr(config, "num_channels", 3), height, width)
    with torch.no_grad():
        features = cast(Callable[..., Any], model.get_image_features)(pixel_values=pixels)
    outputs = getattr(features, "pooler_output", features)
    rows = [x.reshape(-1, x.shape[-1]).shape[0] for x in (outputs if isinstance(outputs, list | tuple) else [outputs])]
    return {"pixel_values": pixels}, sum(rows) // 2


def _patches(model: nn.Module) -> tuple[dict[str, Tensor], int]:
    """Images of 4 x 4 patches, in pieces as from the processors of the Qwen family."""
    config = cast(Any, model.config).vision_config
    channels = getattr(config, "in_channels", 0) or getattr(config, "num_channels", 3)
    width = channels * getattr(config, "temporal_patch_size", 1) * config.patch_size**2
    pixels = torch.randn(2 * _GRID**2, width)
    merged = getattr(config, "spatial_merge_size", 1) ** 2
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, _GRID, _GRID]] * 2)}, _GRID**2 // merged


def _text(model: nn.Module, image_token: int, places: int, labels: bool) -> dict[str, Any]:
    """Two texts, the second one padded, each with places for an image in front."""
    config = cast(Any, model.config).get_text_config()
    special = {v for c in (config, model.config) for k, v in vars(c).items() if k.endswith(("token_id", "token_index"))}
    plain = torch.tensor([i for i in range(min(config.vocab_size, 512)) if i not in special])
    ids = plain[torch.randint(len(plain), (2, places + _TEXT))]
    ids[:, 1 : 1 + places] = image_token
    mask = torch.ones_like(ids)
    mask[1, -_PADDING:] = 0
    pad = getattr(config, "pad_token_id", None) or 0
    ids = ids.masked_fill(mask == 0, pad)
    kwargs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    parameters = inspect.signature(model.forward).parameters
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in parameters:
            kwargs[name] = (ids == image_token).long()
    if labels:
        kwargs["labels"] = ids.masked_fill((mask == 0) | (ids == image_token), _IGNORED)
    return kwargs
