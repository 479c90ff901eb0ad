"""Write a model's weights as torchao's tensor classes, which multiply them when the state is loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fractrain_fx.errors import ExportError
from fractrain_fx.export.blocks import WAY_OUT, block_of, require_held
from fractrain_fx.export.factors import FrozenFactor, FrozenOp
from fractrain_fx.export.layers import (
    attention_names,
    attentions,
    require_all_blocks,
    require_linear,
    rounded_linear_layers,
)
from fractrain_fx.export.rounding import CodedWeight, Levels
from fractrain_fx.export.write import Request
from fractrain_fx.passes import facts

__all__ = ["STATE", "check", "write"]

STATE = "model.pt"

_ACTIVATIONS = (
    "activations{which} are not rounded, because torchao's fixed ranges are for activations of 8 bits beside weights "
    "with levels evenly around 0 (levels='integer'); weights are the same"
)
_NVFP4 = (
    "activations are not rounded, because torchao multiplies two tensors of format 'nvfp4' on the newest GPUs only; "
    "weights are the same"
)
_ATTENTION = "the products of attention stay float, because torchao has classes for weights only: {names}"


def check(request: Request) -> None:
    """Check that torchao has classes for what the model rounds to.

    Raises:
        ExportError: it has not.
    """
    require_all_blocks(request.skipped, "a state has no place for that")
    layers = rounded_linear_layers(request.original, request.ops)
    require_linear(request.original, request.ops, layers, f"torchao's tensor classes multiply no others: {WAY_OUT}")
    for op in layers.values():
        weight, activation = op.weight, op.activation
        assert weight is not None and activation is not None
        # Activations beside a weight of format 'affine' may stay as they are, with a note.
        for factor in (weight,) if weight.fmt.name == "affine" else (weight, activation):
            if not factor.is_rounded:
                raise ExportError(f"{op.name} rounds one factor only: {WAY_OUT.format(name=op.name)}")
            require_held(op, factor, "torchao")
        if weight.value is not None and weight.value.dtype == torch.float64:
            raise ExportError(
                f"{op.name} computes in float64, which torchao's tensor classes do not: train weights in float32, or "
                f"{WAY_OUT.format(name=op.name)}"
            )


@torch.no_grad()
def write(folder: Path, request: Request) -> Sequence[str]:
    """Write ``model.pt``: the state of the original, with torchao's tensors for weights; returns notes."""
    layers = rounded_linear_layers(request.original, request.ops)
    state = {name: x.detach().clone() for name, x in request.original.state_dict().items()}
    for path, op in layers.items():
        assert op.weight is not None and op.activation is not None
        state[f"{path}.weight"] = _CLASSES[op.weight.fmt.name](op.weight, op.activation)
    _multiply(request, layers, state)
    # Not safetensors: torchao's reader of these files takes no parameter of the model itself, such as `cls_token`.
    torch.save(state, folder / STATE)
    return tuple(_notes(request, layers, state))


def _multiply(request: Request, layers: dict[str, FrozenOp], state: dict[str, Any]) -> None:
    """Run the state on the example inputs, because torchao's classes do not take inputs of every form.

    Raises:
        ExportError: one of them does not.
    """
    model = copy.deepcopy(request.original).eval()
    model.load_state_dict(state, assign=True)
    recording, latest = request.recording, [""]
    args, kwargs = recording.present((recording.args, dict(recording.kwargs)))

    def enter(path: str) -> Callable[..., None]:
        return lambda *_: latest.__setitem__(0, path)

    for path in layers:
        model.get_submodule(path).register_forward_pre_hook(enter(path))
    try:
        model(*args, **kwargs)
    except Exception as error:  # an assertion, or whatever a kernel raises
        raise ExportError(
            f"{latest[0]} cannot be multiplied by torchao's {type(state[f'{latest[0]}.weight']).__name__} "
            f"({type(error).__name__}: {error}), which takes no input with gaps in memory, for example: "
            f"{WAY_OUT.format(name=latest[0])}"
        ) from error


def _affine(weight: FrozenFactor, activation: FrozenFactor) -> Any:
    from torchao.quantization import IntxUnpackedToInt8Tensor

    assert weight.within is not None
    rounded = weight.rounded_weight()
    coded = CodedWeight.of(rounded, weight.within, weight.bits)
    if coded.center is None and (levels := _byte_levels(activation)) is not None:
        return _int8(coded, levels, rounded.dtype, len(facts(activation.source).shape or ()))
    shift = torch.zeros_like(coded.scale) if coded.center is None else coded.center
    # Not `from_hp`, which adds the zero point after rounding, so that it has to be whole.
    return IntxUnpackedToInt8Tensor(
        coded.codes,
        coded.scale,
        -shift / coded.scale,
        getattr(torch, f"int{weight.bits}"),
        (1, rounded.shape[-1]),
        rounded.dtype,
        None,
    )


def _byte_levels(activation: FrozenFactor) -> Levels | None:
    """The levels of an activation that torchao rounds to: 256 of them, and one is 0."""
    if activation.bits != 8 or activation.within is None:
        return None
    levels = Levels.of(activation.within, 8)
    return levels if levels.offset is None else None


def _int8(coded: CodedWeight, levels: Levels, dtype: torch.dtype, ndim: int) -> Any:
    """A weight that multiplies codes of activations with ``ndim`` dimensions."""
    from torchao.quantization import PerTensor
    from torchao.quantization.quant_primitives import MappingType
    from torchao.quantization.quantize_.workflows import Int8Tensor, QuantizeTensorToInt8Kwargs

    ones = (1,) * ndim
    return Int8Tensor(
        coded.codes,
        coded.scale,
        [1, coded.codes.shape[-1]],
        dtype,
        act_quant_scale=levels.scale.reshape(ones),
        act_quant_zero_point=torch.full(ones, levels.zero_point - 128, dtype=torch.int8),
        act_quant_kwargs=QuantizeTensorToInt8Kwargs(PerTensor(), MappingType.ASYMMETRIC),
    )


def _fp8(weight: FrozenFactor, activation: FrozenFactor) -> Any:
    from torchao.float8.inference import Float8MMConfig
    from torchao.quantization import Float8Tensor, PerTensor
    from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

    assert weight.value is not None
    how: dict[str, Any] = {"granularity": PerTensor(), "mm_config": Float8MMConfig(use_fast_accum=False)}
    return Float8Tensor.from_hp(weight.value.detach(), act_quant_kwargs=QuantizeTensorToFloat8Kwargs(**how), **how)


def _mx(weight: FrozenFactor, activation: FrozenFactor) -> Any:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, QuantizeTensorToMXKwargs

    assert weight.value is not None
    element = torch.float8_e4m3fn if weight.bits == 8 else torch.float4_e2m1fn_x2
    how = QuantizeTensorToMXKwargs(elem_dtype=element)
    # Of rounded values, because square blocks share the scale of all of their rows; their scales are the same powers.
    return MXTensor.to_mx(weight.rounded_weight().contiguous(), element, 32, act_quant_kwargs=how)


def _nvfp4(weight: FrozenFactor, activation: FrozenFactor) -> Any:
    from torchao.prototype.mx_formats.kernels import f32_to_f4_unpacked, pack_uint4
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    scales = block_of(weight)
    rounded = weight.rounded_weight()
    relative = scales.relative.to(torch.float8_e4m3fn)
    up = (relative.float() * scales.of_tensor).repeat_interleave(16, dim=-1)
    return NVFP4Tensor(
        pack_uint4(f32_to_f4_unpacked(rounded.float() / up)),
        relative,
        16,
        rounded.dtype,
        scales.of_tensor,
    )


_CLASSES: dict[str, Callable[[FrozenFactor, FrozenFactor], Any]] = {
    "affine": _affine,
    "fp8": _fp8,
    "mx": _mx,
    "nvfp4": _nvfp4,
}
"""The tensor class of each format, from the weight and the activation beside it."""


def _notes(request: Request, layers: dict[str, FrozenOp], state: dict[str, Any]) -> Iterator[str]:
    from torchao.quantization import IntxUnpackedToInt8Tensor

    alone = {path for path in layers if isinstance(state[f"{path}.weight"], IntxUnpackedToInt8Tensor)}
    left = [op.name for path, op in layers.items() if path in alone and op.activation and op.activation.is_rounded]
    if left:
        which = "" if len(left) == len(layers) else f" of {', '.join(left)}"
        yield _ACTIVATIONS.format(which=which)
    if any(op.weight and op.weight.fmt.name == "nvfp4" for op in layers.values()):
        yield _NVFP4
    if attention := attention_names(attentions(request.ops)):
        yield _ATTENTION.format(names=", ".join(attention))
