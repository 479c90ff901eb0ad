"""Operands of fused ops that backward makes again from a tensor that autograd keeps anyway.

A layer norm keeps its input, and the op behind it would keep the norm's output as well. Making that output again takes
one pass over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fractrain_fx.execution.autocast import autocast_dtype, autocasting
from fractrain_fx.execution.blocks.original import Original
from fractrain_fx.formats.scratch import Latest
from fractrain_fx.nn.hooks import is_hooked

__all__ = ["Made", "Maker", "ModuleMaker", "Remaking", "can_run_again"]

_KEEP_THEIR_INPUT = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.GELU)

# Packages whose subclasses without submodules compute nothing random; other subclasses may draw random numbers.
_PACKAGES = ("torch", "timm")

_latest = Latest()


class Made(NamedTuple):
    """A value and the tensor that it was made from."""

    source: Tensor
    value: Tensor


class Remaking(Protocol):
    """How an operand is made again."""

    def make(self, *sources: Any) -> Tensor:
        """The operand, bit for bit."""
        ...


class Maker(Protocol):
    """Makes operands of fused ops, and can make them again."""

    def recipe_of(self, operand: Tensor, made: Made) -> tuple[Remaking, Sequence[Tensor | None]] | None:
        """How to make an operand again, and from what; ``None`` if autograd has to keep it.

        Args:
            operand: a value, perhaps in the memory of ``made.value``.
            made: what was made.
        """
        ...


class ModuleMaker:
    """A norm or an activation function of the model.

    Autograd has to keep an operand if it lies in memory of its own, if the output was written into, if no gradient
    flows through the module, so that nothing keeps its input, or if the module has hooks.

    Args:
        original: finds the module.
    """

    def __init__(self, original: Original) -> None:
        self.original = original

    def __repr__(self) -> str:
        # Without an address: what the module is called makes no difference to a compiled op.
        return "ModuleMaker()"

    def recipe_of(self, operand: Tensor, made: Made) -> tuple[Remaking, Sequence[Tensor | None]] | None:
        module, (source, value) = self.original.find(), made
        if not value.requires_grad or value._version or is_hooked(module) or not can_run_again(module):
            return None
        if _viewed(operand) is not _viewed(value):
            return None
        layout = operand.shape, operand.stride(), operand.storage_offset()
        return _ModuleRecipe(module, autocast_dtype(source.device.type), layout), (source,)


def _viewed(x: Tensor) -> Tensor:
    """The tensor that ``x`` is a view of, or ``x``."""
    return x if x._base is None else x._base


class _ModuleRecipe(NamedTuple):
    """A module's output, in the layout of the operand: its shape, strides and offset in memory."""

    module: nn.Module
    autocast: torch.dtype | None
    layout: tuple[Sequence[int], Sequence[int], int | torch.SymInt]

    def make(self, *sources: Any) -> Tensor:
        """The ops of a thread that read one operand one after the other get the same tensor."""
        (source,) = sources
        operand: Tensor | None = _latest.of(source, self)
        if operand is None:
            with autocasting(source.device.type, self.autocast):
                value: Tensor = self.module(source)
            operand = value.as_strided(*self.layout)
            _latest.keep(source, self, operand)
        return operand


def can_run_again(module: nn.Module | None) -> bool:
    """Whether a module keeps its input for backward, and would compute the same from it again, in one or two passes.

    A norm that holds an activation function or dropout, as timm's ``GroupNormAct`` does, may compute something else.
    """
    if not isinstance(module, _KEEP_THEIR_INPUT) or type(module).__module__.split(".")[0] not in _PACKAGES:
        return False
    return all(type(child) is nn.Identity for child in module.children())
