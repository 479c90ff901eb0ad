"""Write a Hugging Face model in the compressed-tensors format, by that library's own compressors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fractrain_fx.capture import call_of
from fractrain_fx.capture.inputs.examples_hf import is_hugging_face
from fractrain_fx.errors import ExportError
from fractrain_fx.export.blocks import WAY_OUT, block_of, require_held
from fractrain_fx.export.factors import FrozenFactor, FrozenOp
from fractrain_fx.export.layers import (
    attention_names,
    attentions,
    linear_layers,
    require_all_blocks,
    require_linear,
    rounded_linear_layers,
    with_rounded_layers,
)
from fractrain_fx.export.write import Request
from fractrain_fx.formats.affine.scale import levels_of
from fractrain_fx.passes import facts

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["check", "write"]

_ATTENTION = (
    "the products of attention stay float, because compressed-tensors has only layers: {names}. FracConfig("
    "attention='float') trains them so"
)
_MX_NOTE = (
    "compressed-tensors rounds the block scales of activations up where the largest value is at least 1.75 times a "
    "power of two, and evaluation rounds them down (OCP Microscaling 1.0); weights are the same"
)
_NVFP4_NOTE = "activations have the fixed tensor scale of the given batches, and evaluation measures it at each call"
_HALF_NOTE = (
    "the model is written in bfloat16, because compressed-tensors unpacks weights of formats 'mx' and 'nvfp4' to that "
    "type; evaluation here computes in the type of the model"
)
_HALF = {"mx", "nvfp4"}
_BYTE_NOTE = (
    "codes of fewer than 8 bits take a byte each, because levels='exact' has zero points that are not whole: "
    "levels='integer' packs them"
)


def check(request: Request) -> None:
    """Check that compressed-tensors has what the model rounds to.

    Raises:
        ExportError: it has not.
    """
    if not is_hugging_face(request.original):
        raise ExportError(
            f"format='compressed-tensors' is for models of transformers, and this is a "
            f"{type(request.original).__name__}: export format='onnx', or format='torchao' for linear layers"
        )
    require_all_blocks(request.skipped, "a model of transformers runs all blocks")
    linear = linear_layers(request.original, request.ops)
    require_linear(request.original, request.ops, linear, f"compressed-tensors has no other layers: {WAY_OUT}")
    for op in rounded_linear_layers(request.original, request.ops).values():
        for factor in op.factors:
            if factor.is_rounded:
                require_held(op, factor, "compressed-tensors")
                _require_range(op, factor)
        if _kind(op) == "nvfp4" and not request.batches:
            raise ExportError(
                f"{op.name} is rounded in format 'nvfp4', whose activations compressed-tensors gives a fixed tensor "
                "scale: give batches=[...], on which it is measured"
            )


def write(folder: Path, request: Request) -> Sequence[str]:
    """Write the folder that ``from_pretrained`` of transformers loads; returns notes."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization.lifecycle.initialize import initialize_module_for_quantization
    from compressed_tensors.quantization.quant_config import QuantizationStatus

    layers = rounded_linear_layers(request.original, request.ops)
    model: Any = with_rounded_layers(request.original, {}, {})
    if {_kind(op) for op in layers.values()} & _HALF:
        model.to(torch.bfloat16)
    input_scales = _input_scales(request, layers)
    single = len({_key(op) for op in layers.values()}) == 1
    schemes = {key: _scheme(request, layers, key, single) for key in {_key(op) for op in layers.values()}}
    for path, op in layers.items():
        layer: Any = model.get_submodule(path)
        weight = op.weight
        assert weight is not None
        values = nn.Parameter(weight.rounded_weight().float(), requires_grad=False)
        layer.register_parameter("weight", values)
        initialize_module_for_quantization(layer, schemes[_key(op)], force_zero_point=False)
        for name, value in _numbers(op, request, input_scales.get(path)).items():
            held = layer.get_parameter(name)
            held.data.copy_(value.reshape(held.shape))
        layer.quantization_status = QuantizationStatus.FROZEN
    with _quiet():
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(folder)
        compressor.update_config(str(folder))
    return tuple(_notes(layers, request, attention_names(attentions(request.ops))))


def _require_range(op: FrozenOp, factor: FrozenFactor) -> None:
    """Check that compressed-tensors measures what a factor measures at each call.

    Raises:
        ExportError: it does not.
    """
    if factor.fmt.name != "affine" or factor.within is not None:
        return
    if _strategy(factor) is None:
        raise ExportError(
            f"{op.name} measures ranges at each call that compressed-tensors does not: it has those of a tensor, and "
            "of each token of (batch, tokens, features). Train with affine.ranges='row', which are those of tokens; "
            f"{WAY_OUT.format(name=op.name)}"
        )
    if factor.levels == "exact":
        raise ExportError(
            f"{op.name} has ranges that are measured at each call, for which compressed-tensors has levels of which "
            "one is 0: export with levels='integer' (fractrain export --levels integer), and measure its accuracy with "
            "deployed(levels='integer')"
        )


def _strategy(factor: FrozenFactor) -> str | None:
    """What shares a range, as compressed-tensors names it, or ``None`` if it has no name for that."""
    if factor.weight:
        return "channel"
    if factor.within is not None or factor.fmt.name != "affine":
        return "tensor"
    rounding = factor.rounding()
    if rounding.of is None and rounding.axis.folded:
        return None
    shape = [max(size, 2) for size in facts(factor.source).shape or ()]
    found = list(rounding.range_of(torch.zeros(shape)).lo.shape)
    if set(found) <= {1}:
        return "tensor"
    # compressed-tensors measures what lies behind the first two dimensions, and all of a tensor that has no more.
    tokens = [*shape[:2], *[1] * (len(shape) - 2)]
    return "token" if len(shape) > 2 and found == tokens else None


def _kind(op: FrozenOp) -> str:
    return op.factors[0].fmt.name


def _key(op: FrozenOp) -> tuple[Any, ...]:
    weight, activation = op.weight, op.activation
    assert weight is not None and activation is not None
    strategy, dynamic = _strategy(activation), activation.within is None
    return weight.fmt.name, weight.bits, activation.bits, strategy, dynamic


def _scheme(request: Request, layers: dict[str, FrozenOp], key: tuple[Any, ...], single: bool) -> Any:
    """The config group of the layers with one precision."""
    from compressed_tensors.config import CompressionFormat
    from compressed_tensors.quantization import QuantizationScheme

    name, bits, input_bits, strategy, dynamic = key
    targets = ["Linear"] if single else [path for path, op in layers.items() if _key(op) == key]
    scheme = QuantizationScheme(
        targets=targets,
        weights=_arguments(name, bits, request, "channel", False),
        input_activations=_arguments(name, input_bits, request, strategy, dynamic) if input_bits != 32 else None,
    )
    if name == "affine":
        packed = bits < 8 and request.levels == "integer"
        scheme.format = CompressionFormat.pack_quantized if packed else CompressionFormat.int_quantized
    return scheme


def _arguments(name: str, bits: int, request: Request, strategy: str, dynamic: Any) -> Any:
    from compressed_tensors.quantization import QuantizationArgs

    if name == "affine":
        exact = request.levels == "exact"
        symmetric = strategy == "channel" and not exact
        more = {} if symmetric else {"zp_dtype": torch.float32 if exact else torch.int8}
        return QuantizationArgs(
            num_bits=bits, type="int", symmetric=symmetric, strategy=strategy, dynamic=dynamic, **more
        )
    if name == "fp8":
        return QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="tensor", dynamic=dynamic)
    two_scales = name == "nvfp4"
    of_block = torch.float8_e4m3fn if two_scales else torch.uint8
    return QuantizationArgs(
        num_bits=bits,
        type="float",
        symmetric=True,
        strategy="tensor_group" if two_scales else "group",
        group_size=16 if two_scales else 32,
        dynamic="local" if dynamic and two_scales else dynamic,
        scale_dtype=of_block,
        zp_dtype=of_block,
    )


def _numbers(op: FrozenOp, request: Request, input_scale: Tensor | None) -> dict[str, Tensor]:
    """Scales and zero points of a layer, by the names that compressed-tensors gives them."""
    weight, activation = op.weight, op.activation
    assert weight is not None and activation is not None
    if weight.fmt.name == "affine":
        numbers = _affine("weight", weight, symmetric=request.levels == "integer")
        fixed = activation.is_rounded and activation.within is not None
        return numbers | (_affine("input", activation, symmetric=False) if fixed else {})
    blocks = block_of(weight)
    if weight.fmt.name == "nvfp4":
        # compressed-tensors divides by its tensor scale.
        numbers = {"weight_scale": blocks.relative, "weight_global_scale": 1 / blocks.of_tensor}
        return numbers | ({} if input_scale is None else {"input_global_scale": input_scale})
    return {"weight_scale": blocks.scale}


def _affine(name: str, factor: FrozenFactor, *, symmetric: bool) -> dict[str, Tensor]:
    """Scale and zero point for codes from ``-2^(bits - 1)``."""
    assert factor.within is not None
    levels = levels_of(factor.within, factor.bits)
    zero = {} if symmetric else {f"{name}_zero_point": levels.zero - 2 ** (factor.bits - 1)}
    return {f"{name}_scale": levels.scale, **zero}


@torch.no_grad()
def _input_scales(request: Request, layers: dict[str, FrozenOp]) -> dict[str, Tensor]:
    """The tensor scales of activations of format ``nvfp4``, measured on the batches in the rounded model."""
    from compressed_tensors.quantization.utils import generate_gparam

    watched = {path: op for path, op in layers.items() if _kind(op) == "nvfp4" and op.activation}
    if not watched or not request.batches:
        return {}
    model = with_rounded_layers(request.original, layers, attentions(request.ops))
    largest: dict[str, Tensor] = {}

    def watch(path: str) -> Callable[..., None]:
        def see(layer: nn.Module, args: Any, output: Any) -> None:
            size = args[0].detach().float().abs().amax()
            largest[path] = torch.maximum(largest.get(path, size), size)

        return see

    for path in watched:
        model.get_submodule(path).register_forward_hook(watch(path))
    for batch in request.batches:
        args, kwargs = call_of(batch)
        model(*args, **kwargs)
    missing = watched.keys() - largest.keys()
    if missing:
        raise ExportError(
            f"the batches do not run {min(missing)}, so its activations have no tensor scale: give others"
        )
    return {path: generate_gparam(-size, size) for path, size in largest.items()}


def _notes(layers: dict[str, FrozenOp], request: Request, attention: Sequence[str]) -> Iterator[str]:
    kinds = {_kind(op) for op in layers.values()}
    if attention:
        yield _ATTENTION.format(names=", ".join(attention))
    if kinds & _HALF:
        yield _HALF_NOTE
    if "mx" in kinds:
        yield _MX_NOTE
    if "nvfp4" in kinds:
        yield _NVFP4_NOTE
    few = any(op.weight and op.weight.bits < 8 and op.weight.fmt.name == "affine" for op in layers.values())
    if few and request.levels == "exact":
        yield _BYTE_NOTE


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the progress bars of compressed-tensors and the notices of transformers to themselves."""
    from unittest.mock import patch

    from compressed_tensors.compressors.model_compressors import model_compressor

    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with patch.object(model_compressor, "tqdm", lambda items, **_: items):
            yield
    finally:
        logger.setLevel(level)
