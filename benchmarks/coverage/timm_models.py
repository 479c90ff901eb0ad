"""Every architecture of timm, with drop rates on, at a small image size and cut in depth and width."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.coverage.cases import Case, NotBuiltError, Ready
from benchmarks.coverage.timm_shrink import Cut, cutting
from fractrain_fx.capture.state import Snapshot

__all__ = ["build", "cases"]

_SIDES = (64, 96, 120, 160, 192, 224, 256)
_OPTIONS = {"drop_rate": 0.1, "drop_path_rate": 0.1}
_CUTS = (Cut(True, True), Cut(True, False), Cut(False, False))
_SMALL_WORDS = ("test", "atto", "femto", "pico", "nano", "micro", "zepto", "tiny", "mini", "xxs", "xs", "small", "lite")


def cases(sample: bool) -> list[Case]:
    """All architectures, or two of each module whose names suggest small models."""
    import timm

    chosen: list[Case] = []
    for module in timm.list_modules():
        names = sorted(timm.list_models(module=module), key=_promise)
        chosen += [Case("timm", name, module) for name in (names[:2] if sample else names)]
    # Modules in turn, so that a sweep has results for every module after a short time.
    places: dict[str, int] = {}
    for case in chosen:
        places[case.name] = sum(other.group == case.group for other in chosen[: chosen.index(case)])
    return sorted(chosen, key=lambda case: places[case.name])


def _promise(name: str) -> tuple[int, int, str]:
    """A sort key that puts small models first, by words and the first number in a name."""
    words = [i for i, word in enumerate(_SMALL_WORDS) if word in name]
    numbers = re.findall(r"\d+", name)
    return (min(words, default=len(_SMALL_WORDS)), int(numbers[0]) if numbers else 0, name)


def build(case: Case) -> Ready:
    """The model, cut as far as possible, at the smallest side that it takes.

    Raises:
        NotBuiltError: timm cannot build it, or it rejects every size.
    """
    import timm

    channels, _, native = timm.get_pretrained_cfg(case.name).input_size  # type: ignore[union-attr]
    error: Exception | None = None
    for cut in _CUTS:
        options = _accepted(case.name, {**_OPTIONS, "img_size": native}, cut)
        for side in dict.fromkeys((*(s for s in _SIDES if s < native), native)):
            made = options | ({"img_size": side} if "img_size" in options else {})
            try:
                model = _create(case.name, made, cut)
                x = torch.randn(2, channels, side, side)
                _runs(model, x)
            except Exception as rejected:  # this size does not suit this model; the next one may
                error = rejected
                if "img_size" not in made and isinstance(rejected, TypeError):
                    break
                continue
            how = {"image": side, "cut": cut.names, **made}
            return Ready(model, lambda made=made, cut=cut: _create(case.name, made, cut), (x,), {}, how)  # type: ignore[misc]
    raise NotBuiltError(f"it takes no image side up to {native}: {type(error).__name__}: {str(error)[:200]}")


def _create(name: str, options: Mapping[str, Any], cut: Cut) -> nn.Module:
    import timm

    with cutting(cut):
        model: nn.Module = timm.create_model(name, pretrained=False, num_classes=10, **options)
    return model


def _runs(model: nn.Module, x: torch.Tensor) -> None:
    """Run the model, which may raise, and restore it afterwards: some models fill caches at the first call."""
    with torch.no_grad(), Snapshot(model).preserved():
        model.train()(x)
        model.eval()(x)


def _accepted(name: str, options: dict[str, Any], cut: Cut) -> dict[str, Any]:
    """The options without those that this architecture does not know."""
    while options:
        try:
            with torch.device("meta"):
                _create(name, options, cut)
            return options
        except TypeError as error:
            unknown = options.keys() & set(re.findall(r"'(\w+)'", str(error)))
            if not unknown:
                return options
            options = {name: value for name, value in options.items() if name not in unknown}
        except Exception:  # the model does not take the meta device, or the size
            return options
    return options
