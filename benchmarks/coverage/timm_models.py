"""Every architecture of timm, with drop rates on, at a small image size and, where it is large, at less depth."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.coverage.cases import Case, NotBuiltError, Ready
from fractrain_fx.capture.state import Snapshot

__all__ = ["build", "cases"]

_SIDES = (64, 96, 128, 160, 192, 224, 256)
_DROP = {"drop_rate": 0.1, "drop_path_rate": 0.1}
_DEPTHS = ("depth", "depths", "layers", "num_blocks", "num_layers", "block_depths")
_LARGE = 12_000_000
_SMALL_WORDS = ("test", "atto", "femto", "pico", "nano", "micro", "zepto", "tiny", "mini", "xxs", "xs", "small", "lite")


def cases(sample: bool) -> list[Case]:
    """All architectures, or two of each module: those whose names promise to be small."""
    import timm

    found: list[Case] = []
    for module in timm.list_modules():
        names = timm.list_models(module=module)
        if sample:
            names = sorted(names, key=_promise)[:2]
        found += [Case("timm", name, module) for name in names]
    return found


def _promise(name: str) -> tuple[int, int, str]:
    """Sorts small models first, by the words and the first number in a name."""
    words = [i for i, word in enumerate(_SMALL_WORDS) if word in name]
    numbers = re.findall(r"\d+", name)
    return (min(words, default=len(_SMALL_WORDS)), int(numbers[0]) if numbers else 0, name)


def build(case: Case) -> Ready:
    """The model at the smallest side that it takes.

    Raises:
        NotBuiltError: timm cannot make it, or it rejects every size.
    """
    options, depth = _accepted(case.name, dict(_DROP)), {}
    meta = _on_meta(case.name, options)
    if _count(meta) > _LARGE:
        depth = _shallower(case.name, meta, options)
    native = tuple(getattr(meta, "pretrained_cfg", {}).get("input_size", (3, 224, 224)))
    errors: list[str] = []
    for side in dict.fromkeys((*(s for s in _SIDES if s < native[-1]), native[-1])):
        for sized in ({"img_size": side}, {}):
            made = {**options, **depth, **sized}
            try:
                model = _create(case.name, made)
                x = torch.randn(2, native[0], side, side)
                _runs(model, x)
            except Exception as error:  # this size is not for this model; the next one may be
                errors.append(f"{side}: {type(error).__name__}: {str(error)[:150]}")
                continue
            how = {"image": side, **{k: list(v) if isinstance(v, tuple) else v for k, v in made.items()}}
            return Ready(model, lambda made=made: _create(case.name, made), (x,), {}, how)  # type: ignore[misc]
    raise NotBuiltError(f"it takes no image side from {_SIDES[0]} to {native[-1]}: {errors[-1]}")


def _create(name: str, options: Mapping[str, Any]) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=10, **options)
    return model


def _runs(model: nn.Module, x: torch.Tensor) -> None:
    """Raise what the model says to an input, and leave it as new: some fill caches at the first call."""
    with torch.no_grad(), Snapshot(model).kept():
        model.train()(x)
        model.eval()(x)


def _on_meta(name: str, options: Mapping[str, Any]) -> nn.Module:
    try:
        with torch.device("meta"):
            return _create(name, options)
    except Exception:  # it reads values while it is made
        return _create(name, options)


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _accepted(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options without those that this architecture does not know."""
    while options:
        try:
            with torch.device("meta"):
                _create(name, options)
            return options
        except TypeError as error:
            unknown = re.search(r"argument '(\w+)'", str(error))
            if unknown is None or unknown[1] not in options:
                return options
            del options[unknown[1]]
        except Exception:  # the meta device is not for this one
            return options
    return options


def _shallower(name: str, meta: nn.Module, options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that cut the depth of an architecture: what its class was given, at most two blocks a stage."""
    kind, given = type(meta), {}
    init = kind.__init__

    def spy(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        given.update(kwargs)
        init(self, *args, **kwargs)

    kind.__init__ = spy  # type: ignore[method-assign]
    try:
        _on_meta(name, options)
    finally:
        kind.__init__ = init  # type: ignore[method-assign]
    for field in _DEPTHS:
        value = given.get(field)
        if isinstance(value, int) and not isinstance(value, bool):
            cut: Any = min(value, 2)
        elif isinstance(value, tuple | list) and all(isinstance(each, int) for each in value):
            cut = type(value)(min(each, 2) for each in value)
        else:
            continue
        try:
            if _count(_on_meta(name, {**options, field: cut})) < _count(meta):
                return {field: cut}
        except Exception:  # the entry function sets it by itself
            continue
    return {}
