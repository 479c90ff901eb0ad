"""Write the adapters of a PEFT model so that they name the base that they were trained on, and how it was rounded."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from fractrain_fx.config import FracConfig
from fractrain_fx.durable import write_text
from fractrain_fx.errors import ConfigError, ModelError

__all__ = ["save_adapter"]

_RECORD = "fractrain_fx.json"
_HEADING = "## Rounded base"


def save_adapter(
    model: nn.Module, directory: Path, base: str | None, bits: Mapping[str, int], config: FracConfig
) -> None:
    """Write the adapters of a ``PeftModel`` as PEFT does, and the base's name and widths beside them.

    ``base`` is by default the name that PEFT knows; ``bits`` has the widths of the base's weights in training, by the
    name of the op.
    """
    adapters: dict[str, Any] = getattr(model, "peft_config", {})
    save: Any = getattr(model, "save_pretrained", None)
    if not adapters or save is None:
        raise ModelError(
            f"{type(model).__name__} has no adapters of PEFT: save_adapter writes those of a PeftModel, and "
            "save_pretrained a whole model"
        )
    known = next((peft.base_model_name_or_path for peft in adapters.values() if peft.base_model_name_or_path), None)
    base = base or known
    if not base:
        raise ConfigError(
            "PEFT does not know the name of the base model, which was not loaded with from_pretrained: write "
            "save_adapter(directory, base='organisation/name')"
        )
    for peft in adapters.values():
        peft.base_model_name_or_path = base
    save(str(directory))
    counts = sorted(Counter(bits.values()).items())
    words = ", ".join(f"{count} {'weight' if count == 1 else 'weights'} to {width} bits" for width, count in counts)
    record = {"base": base, "format": config.format, "bits": dict(bits), "config": config.to_dict()}
    write_text(directory / _RECORD, json.dumps(record, indent=2) + "\n")
    card = directory / "README.md"
    before = card.read_text(encoding="utf-8").partition(_HEADING)[0].rstrip() if card.is_file() else ""
    section = (
        f"{_HEADING}\n\nThese adapters were trained on `{base}` with rounded weights (fractrain_fx, format "
        f"`{config.format}`): {words}. On the float base they give other results. `{_RECORD}` has the width of each "
        "weight. To compute as in training, load base and adapters, and rewrite them with the configuration in that "
        "file: `fractrainify(model, config=FracConfig.from_dict(...))`; `restore(rounded=True)` of that gives a model "
        "in float with the rounded weights.\n"
    )
    write_text(card, f"{before}\n\n{section}".lstrip())
