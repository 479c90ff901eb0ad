"""Build the architecture of a saved model from what its folder says, without the code that trained it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from fractrain_fx.errors import RunError

__all__ = ["RECIPE", "architecture_in", "named"]

RECIPE = "fractrain_fx.json"
_WAY_OUT = "give its architecture: FracModel.from_pretrained(folder, model=...), or --model FILE.py:FUNCTION"


def named(model: nn.Module) -> dict[str, Any] | None:
    """The name of a timm model and its number of classes, as a recipe keeps them; ``None`` for other models."""
    config: Any = getattr(model, "pretrained_cfg", None)
    name = config.get("architecture") if isinstance(config, dict) else None
    return {"timm": name, "num_classes": getattr(model, "num_classes", None)} if name else None


def architecture_in(folder: Path) -> nn.Module:
    """A fresh model of the architecture that ``save_pretrained`` wrote into a folder."""
    try:
        recipe = json.loads((folder / RECIPE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(
            f"{folder} holds neither a run (config.yaml) nor a model that save_pretrained wrote ({RECIPE}): {error}"
        ) from error
    kind, name = str(recipe.get("architecture")), recipe.get("named")
    if name is not None:
        import timm

        sizes = {} if name.get("num_classes") is None else {"num_classes": name["num_classes"]}
        timm_model: nn.Module = timm.create_model(name["timm"], pretrained=False, **sizes)
        if type(timm_model).__name__ == kind:
            return timm_model
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if "model_type" in config and kind in config.get("architectures", ()):
        import transformers

        if hasattr(transformers, kind):
            settings = transformers.AutoConfig.from_pretrained(folder)
            hf_model: nn.Module = getattr(transformers, kind)(settings)
            return hf_model
    raise RunError(f"{folder} holds a {kind}, which is neither timm's nor transformers': {_WAY_OUT}")
