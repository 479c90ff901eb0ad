"""Guess example inputs for a model from its own configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fractrain_fx.capture.inputs.examples_hf import HuggingFaceInputs, is_hugging_face
from fractrain_fx.capture.inputs.wrappers import adapted_model
from fractrain_fx.errors import InputError

__all__ = ["example_inputs"]

TORCHVISION_SIZE = 224
# the only classifier of torchvision whose auxiliary head has no positions left at 224
INCEPTION_SIZE = 299


def example_inputs(
    model: nn.Module, *, batch: int = 2, labels: bool = False
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Guess positional and keyword inputs for a timm, Hugging Face or torchvision model.

    The values are random but the same at every call, on the model's device and of its floating type. Texts are padded
    for real: with a mask of ones, graph and model would never be compared on padding.

    Args:
        model: the model, which is neither run nor changed; PEFT's adapters do not change its inputs.
        batch: number of samples.
        labels: also give the labels that a Hugging Face head takes, so that its loss is inside the model.

    Returns:
        ``args`` and ``kwargs`` for ``model(*args, **kwargs)``.

    Raises:
        InputError: the model is not from these libraries, or its configuration does not describe its inputs.
    """
    generator, model = torch.Generator().manual_seed(0), adapted_model(model)
    if is_hugging_face(model):
        kwargs = HuggingFaceInputs(model, batch, generator).build(labels)
        return (), {name: _like_model(model, value) for name, value in kwargs.items()}
    size = _timm_size(model) or _torchvision_size(model)
    if size is None:
        raise InputError(
            f"{type(model).__module__}.{type(model).__qualname__} does not say what it takes, as timm, "
            "Hugging Face and torchvision models do: pass what you call it with, for example "
            "example_inputs=(torch.randn(2, 3, 32, 32),) or example_kwargs={...}"
        )
    return (_like_model(model, torch.randn(batch, *size, generator=generator)),), {}


def _timm_size(model: nn.Module) -> tuple[int, int, int] | None:
    """Channels, height and width that timm's configuration and the model as built agree on."""
    cfg: Any = getattr(model, "pretrained_cfg", None)
    if not cfg or not any(base.__module__.startswith("timm.") for base in type(model).__mro__):
        return None
    channels, height, width = cfg["input_size"]
    # The configuration is the checkpoint's; the model may have been built for another size or number of channels.
    for module in model.modules():
        side = getattr(module, "img_size", None)
        if side is not None:
            height, width = (side, side) if isinstance(side, int) else side
            break
    convolutions = (module for module in model.modules() if isinstance(module, nn.Conv2d))
    stem = dict(model.named_modules()).get(str(cfg.get("first_conv")), next(convolutions, None))
    return getattr(stem, "in_channels", channels), height, width


def _torchvision_size(model: nn.Module) -> tuple[int, int, int] | None:
    """Channels, height and width of torchvision's classifiers and segmentation models."""
    module = type(model).__module__
    other_inputs = ("detection", "optical_flow", "video")
    if not module.startswith("torchvision.models.") or module.split(".")[2] in other_inputs:
        return None
    default = INCEPTION_SIZE if type(model).__name__ == "Inception3" else TORCHVISION_SIZE
    side = getattr(model, "image_size", default)
    return 3, side, side


def _like_model(model: nn.Module, value: Tensor) -> Tensor:
    """``value`` on the model's device, in the model's floating type if it is floating."""
    like = next((p for p in model.parameters() if p.is_floating_point()), None)
    if like is None:
        return value
    return value.to(like.device, like.dtype if value.is_floating_point() else value.dtype)
