"""The scales of a weight in a block format, as other libraries hold them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fractrain_fx.errors import ExportError
from fractrain_fx.export.factors import FrozenFactor, FrozenOp
from fractrain_fx.formats.microscaling import block_format

__all__ = ["WAY_OUT", "BlockScales", "block_of", "require_held"]

WAY_OUT = "leave it float with Pin({name!r}, format='float'), or export format='onnx'"

_GROUPS = {"mx": 32, "nvfp4": 16}


class BlockScales(NamedTuple):
    """The scales of a weight.

    Attributes:
        scale: of each row's blocks, or of the tensor.
        relative: of each row's blocks, relative to ``of_tensor`` (``nvfp4``).
        of_tensor: the scale of the tensor (``nvfp4``).
    """

    scale: Tensor
    relative: Tensor
    of_tensor: Tensor


def require_held(op: FrozenOp, factor: FrozenFactor, target: str) -> None:
    """Check that other libraries hold the values of a factor: integers of a byte, or blocks that are rounded alike.

    Raises:
        ExportError: they do not.
    """
    fmt, name, way_out = block_format(factor.fmt), factor.fmt.name, WAY_OUT.format(name=op.name)
    if name == "affine":
        if factor.bits > 8:
            raise ExportError(
                f"{op.name} has {factor.bits} bits, and {target} has integers of 2 to 8: pin it to 8 bits, or {way_out}"
            )
        return
    if fmt is None or name == "int":
        raise ExportError(
            f"{op.name} is rounded in format {name!r}, in square blocks or rows of integers, which {target} does not "
            f"have: train with format 'affine', or {way_out}"
        )
    has = {"mx": (4, 8), "nvfp4": (4,), "fp8": (8,)}[name]
    if factor.bits not in has:
        raise ExportError(
            f"{op.name} has {factor.bits} bits in format {name!r}, and {target} has {' and '.join(map(str, has))}: pin "
            f"it to one of these, or {way_out}"
        )
    forward = fmt.recipe.forward
    for setting in ("per_row", "block", "four_over_six"):
        if any(getattr(operand, setting) for operand in (forward.first, forward.second)):
            raise ExportError(
                f"{op.name} is rounded with scales of its recipe ({setting}), and files here hold those of the format "
                f"alone: train with a recipe without it, or {way_out}"
            )
    if factor.bits == 8 and any(operand.eight == "e5m2" for operand in (forward.first, forward.second)):
        raise ExportError(f"{op.name} multiplies e5m2 numbers, and {target} has e4m3: train with e4m3, or {way_out}")
    group = _GROUPS.get(name)
    size = factor.value.shape[-1] if factor.weight and factor.value is not None else None
    if group and size and size % group:
        raise ExportError(
            f"{op.name} sums over {size} values, not a multiple of the {group} of a block, and {target} has only whole "
            f"blocks: {way_out}"
        )


def block_of(weight: FrozenFactor) -> BlockScales:
    """The scales that evaluation rounds a weight with; square blocks repeat theirs in each row."""
    fmt = block_format(weight.fmt)
    assert weight.value is not None and weight.of is not None and fmt is not None
    w = weight.value.detach()
    up = fmt.scales_of(w, weight.bits, weight.of)
    group = _GROUPS.get(fmt.name)
    if group is None:
        return BlockScales(up.flatten()[:1], up, up)
    scale = up[..., ::group].contiguous()
    # As formats/microscaling/scales.py takes it: the largest value becomes the largest e4m3 number times that of e2m1.
    of_tensor = (w.float().abs().amax() / torch.tensor(448.0 * 6.0)).clamp(min=2.0**-126)
    return BlockScales(scale, scale / of_tensor, of_tensor)
