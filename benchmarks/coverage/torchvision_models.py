"""torchvision's classifiers, segmentation and detection models, whole except for repeated blocks of the largest.

A detector cannot be a graph, because values decide what it computes. Its backbone, which the error tells users to
rewrite instead, is a separate case.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.coverage.cases import Case, NotBuiltError, Ready
from fractrain_fx.capture.inputs.examples import example_inputs
from fractrain_fx.errors import InputError

__all__ = ["build", "cases"]

_SIDES = (64, 96, 128, 224)
# Number of parameters above which a model keeps only the first two of each sequence of equal blocks.
_LARGE, _ALIKE = 200_000_000, 2
_BACKBONE, _DETECTED = ".backbone", 128


def cases(sample: bool) -> list[Case]:
    """All models of the three tasks and the backbones of detectors, or two of each module."""
    import torchvision.models as zoo

    chosen: list[Case] = []
    counts: dict[str, int] = {}
    for module in (zoo, zoo.segmentation, zoo.detection):
        for name in zoo.list_models(module=module):
            group = zoo.get_model_builder(name).__module__.removeprefix("torchvision.models.")
            counts[group] = counts.get(group, 0) + 1
            if not sample or counts[group] <= 2:
                parts = (name, name + _BACKBONE) if module is zoo.detection else (name,)
                chosen += [Case("torchvision", part, group) for part in parts]
    return chosen


def build(case: Case) -> Ready:
    """The model without pretrained weights, also in its backbone.

    Raises:
        NotBuiltError: the model rejects every size.
    """
    model, cut = _create(case.name)
    how = {"cut": ["depth"]} if cut else {}
    if case.group.startswith("detection") and not case.name.endswith(_BACKBONE):
        images, targets = _detection_batch()
        return Ready(model, lambda: _create(case.name)[0], (images, targets), {}, {"image": _DETECTED} | how)
    error: Exception | None = None
    for side in _sides(model):
        x = torch.randn(2, 3, side, side)
        try:
            with torch.no_grad():
                model.train()(x)
                model.eval()(x)
        except Exception as rejected:  # too small for its poolings, or fixed by its positions
            error = rejected
            continue
        return Ready(model, lambda: _create(case.name)[0], (x,), {}, {"image": side} | how)
    raise NotBuiltError(f"it takes no image of sides {_sides(model)}: {error}")


def _create(name: str) -> tuple[nn.Module, bool]:
    """The model, and whether blocks were removed."""
    import torchvision.models as zoo

    whole, part = name.removesuffix(_BACKBONE), name.endswith(_BACKBONE)
    accepted = inspect.signature(zoo.get_model_builder(whole)).parameters
    options: dict[str, Any] = {"weights_backbone": None} if "weights_backbone" in accepted else {}
    if "rcnn" in whole or "retinanet" in whole or "fcos" in whole:
        options |= {"min_size": _DETECTED, "max_size": _DETECTED}
    model: nn.Module = zoo.get_model(whole, weights=None, num_classes=10, **options)
    model = model.get_submodule(_BACKBONE[1:]) if part else model
    large = sum(p.numel() for p in model.parameters()) > _LARGE
    if large:
        _shorten(model)
    return model, large


def _shorten(model: nn.Module) -> None:
    """Remove repeated blocks: consecutive modules of one class with the same shapes."""
    for row in [module for module in model.modules() if isinstance(module, nn.Sequential)]:
        kinds = [(type(m), [(n, p.shape) for n, p in m.named_parameters()]) for m in row]
        for i, name in enumerate(list(row._modules)):
            if i >= _ALIKE and kinds[i][1] and all(kind == kinds[i] for kind in kinds[i - _ALIKE : i]):
                delattr(row, name)


def _sides(model: nn.Module) -> tuple[int, ...]:
    try:
        (x,), _ = example_inputs(model)
    except InputError:  # a backbone
        return (*_SIDES[1:], 320)
    return (*(side for side in _SIDES if side < x.shape[-1]), x.shape[-1])


def _detection_batch() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Two images with two boxes each."""
    boxes = torch.tensor([[8.0, 8.0, 60.0, 60.0], [40.0, 30.0, 100.0, 110.0]])
    target = {"boxes": boxes, "labels": torch.tensor([1, 2])}
    masks = torch.zeros(2, _DETECTED, _DETECTED, dtype=torch.uint8)
    masks[0, 8:60, 8:60], masks[1, 30:110, 40:100] = 1, 1
    keypoints = torch.rand(2, 17, 3) * torch.tensor([50.0, 50.0, 0.0]) + torch.tensor([8.0, 8.0, 1.0])
    targets = [{**target, "masks": masks, "keypoints": keypoints} for _ in range(2)]
    return [torch.rand(3, _DETECTED, _DETECTED) for _ in range(2)], targets
