"""Decide what setting an attribute of a rewritten model does, because its graph does not follow."""

from __future__ import annotations

from typing import Any

from torch import nn

from fractrain_fx.errors import ModelError
from fractrain_fx.tied.structure import ADAPTERS_FIRST, is_adapter

__all__ = ["belongs_to_original", "require_no_part"]


def belongs_to_original(model: nn.Module, original: nn.Module, name: str, read: bool) -> bool:
    """Whether an attribute to be set is a plain attribute of the original, which the model reads from there.

    ``read``: the original's forward reads it, although the original may not have it yet.
    """
    kept_by_torch = name in model._parameters or name in model._buffers or name in model._modules
    return not (kept_by_torch or name in vars(model) or hasattr(type(model), name)) and (
        read or hasattr(original, name)
    )


def require_no_part(model: nn.Module, name: str, value: Any) -> None:
    """Check that setting an attribute adds or replaces no module or parameter that the graph would not use.

    A parameter may replace one of the same shape, as assigning a checkpoint does.

    Raises:
        ModelError: it would.
    """
    before = model._modules.get(name, model._parameters.get(name))
    if value is before or (before is None and not isinstance(value, nn.Module | nn.Parameter)):
        return
    if isinstance(value, nn.Parameter) and isinstance(before, nn.Parameter) and value.shape == before.shape:
        return
    if is_adapter(value):
        raise ModelError(
            f"PEFT would replace {name}, a {type(before).__name__} that the rewritten graph was made for: "
            f"{ADAPTERS_FIRST}; take a new model, because this one may hold some of its adapters already"
        )
    if before is None:
        raise ModelError(
            f"{name} = {type(value).__name__}(...) would add a part to a rewritten model, whose graph does not run it: "
            "add it to the model before fractrainify, or hold it beside the rewritten model"
        )
    raise ModelError(
        f"{name} = {type(value).__name__}(...) would replace a {type(before).__name__} that the rewritten graph was "
        f"made for: set it on the original (plain = model.restore(); plain.{name} = ...) and call fractrainify(plain)"
    )
