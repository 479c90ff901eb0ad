"""Write the evaluation graph as ONNX, by torch's exporter: roundings become QuantizeLinear and DequantizeLinear."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule

from fractrain_fx.capture.trees import tensors_in
from fractrain_fx.errors import ExportError
from fractrain_fx.export.factors import FrozenFactor
from fractrain_fx.export.folding import fold_batch_norms
from fractrain_fx.export.graph import frozen_graph
from fractrain_fx.export.onnx_weights import BITS, adapt_weights
from fractrain_fx.export.rounding import CodedWeight, FrozenRounding, Levels
from fractrain_fx.export.write import Request
from fractrain_fx.formats.affine.scale import levels_of

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["MODEL", "check", "write"]

MODEL = "model.onnx"
_OPSET = 21  # the first in which QuantizeLinear has numbers of 4 bits
_MOST_BITS = 8


def check(request: Request) -> None:
    """Check that QuantizeLinear has what the model rounds to.

    Raises:
        ExportError: it has not.
    """
    for op, factor in request.factors:
        if factor.fmt.name != "affine":
            raise ExportError(
                f"{op.name} is rounded in format {factor.fmt.name!r}, which finds a scale for each block or tensor at "
                "each call, and QuantizeLinear has fixed scales: export a Hugging Face model with "
                "format='compressed-tensors', linear layers with 'torchao', or train with format 'affine' for ONNX"
            )
        if factor.bits > _MOST_BITS:
            raise ExportError(
                f"{op.name} has {factor.bits} bits, and QuantizeLinear is written with 2 to {_MOST_BITS} here: pin it "
                f"to 8 bits or to float (Pin({op.name!r}, ...)), or export another stage"
            )
        if factor.value is not None and factor.value.dtype != torch.float32:
            raise ExportError(
                f"{op.name} computes in {str(factor.value.dtype).removeprefix('torch.')}, and QuantizeLinear is "
                "written in float32 here: train weights in float32, as mixed precision does, or leave it float with "
                f"Pin({op.name!r}, format='float')"
            )
        if factor.weight and factor.value is None:
            raise ExportError(
                f"the weight of {op.name} is computed in the graph (a transposed or stacked parameter), so it has no "
                f"codes to write: leave it float with Pin({op.name!r}, format='float')"
            )
    for name in ("fold_batch_norm", "fold_weights", "dynamic"):
        if not isinstance(request.options.get(name, False), bool):
            raise ExportError(f"{name}={request.options[name]!r} is a switch: write True or False")
    if request.options.get("fold_weights", False) and request.levels == "exact":
        raise ExportError(
            "fold_weights=True is for levels='integer', with which onnxruntime multiplies codes: add that, or leave "
            "fold_weights out and start the session with session.disable_quant_qdq=1, which folds exact levels"
        )


def write(folder: Path, request: Request) -> Sequence[str]:
    """Write ``model.onnx`` and check it with ``onnx.checker``; returns notes.

    Raises:
        ExportError: torch's exporter cannot write an operation of the model.
    """
    import onnx
    import onnx_ir as ir

    graph = frozen_graph(request.original, request.recording.eval, request.ops, _module_of, request.skipped)
    if request.options.get("fold_batch_norm", False):
        fold_batch_norms(graph)
    inputs = tuple(request.recording.present(request.recording.inputs))
    names = list(request.recording.call.placeholders)
    shapes = tuple(_dynamic(x) if request.options.get("dynamic", True) else None for x in inputs)
    try:
        program: Any = torch.onnx.export(
            graph,
            inputs,
            dynamo=True,
            opset_version=_OPSET,
            input_names=names,
            output_names=_output_names(graph, inputs),
            dynamic_shapes=shapes,
            verbose=False,
        )
    except Exception as error:  # torch.onnx wraps whatever went wrong in errors of several kinds
        raise ExportError(
            f"torch's ONNX exporter cannot write this {type(request.original).__name__}: {_reason(error)}. Export a "
            "Hugging Face model with format='compressed-tensors', or leave the part that it names float"
        ) from error
    _name_sizes(program.model)
    adapt_weights(program.model, at_load=request.options.get("fold_weights", False))
    for node in ir.traversal.RecursiveGraphIterator(program.model.graph):
        node.metadata_props.clear()  # the exporter's notes are most of a small file
    target = folder / MODEL
    program.save(str(target), external_data=False)
    onnx.checker.check_model(str(target), full_check=True)
    return [
        f"input {model_input.name} has a fixed batch of {model_input.shape[0]}"
        for model_input in program.model.graph.inputs
        if request.options.get("dynamic", True) and isinstance(model_input.shape[0], int)
    ]


class _QuantizedActivation(nn.Module):
    """QuantizeLinear and DequantizeLinear around an activation, for torch's exporter."""

    scale: Tensor
    zero_point: Tensor

    def __init__(self, factor: FrozenFactor) -> None:
        super().__init__()
        assert factor.within is not None
        levels, (lo, span, _) = Levels.of(factor.within, factor.bits), factor.within
        # Codes of few bits lie in a byte, which saturates later. ONNX has a type of 4 bits, but onnxruntime 1.32 fails
        # to load a ReLU6 before it.
        self.ends = (float(lo), float(lo + span)) if factor.bits < _MOST_BITS else None
        self.register_buffer("scale", levels.scale.float().clone())
        self.register_buffer("zero_point", torch.tensor(levels.zero_point, dtype=torch.uint8))
        self.register_buffer("offset", None if levels.offset is None else levels.offset.float())

    def forward(self, x: Tensor) -> Tensor:
        """The rounded values; runs in torch's exporter only."""
        offset: Any = self.offset
        if self.ends is not None:
            x = x.clamp(*self.ends)
        x = x if offset is None else x - offset
        how: dict[str, Any] = {"shape": x.shape, "version": _OPSET}
        codes = torch.onnx.ops.symbolic("QuantizeLinear", (x, self.scale, self.zero_point), dtype=torch.uint8, **how)
        x = torch.onnx.ops.symbolic("DequantizeLinear", (codes, self.scale, self.zero_point), dtype=x.dtype, **how)
        return x if offset is None else x + offset


class _MeasuredActivation(nn.Module):
    """Levels in ranges that are measured at each call, for torch's exporter; QuantizeLinear has fixed ranges only."""

    def __init__(self, rounding: FrozenRounding) -> None:
        super().__init__()
        self.rounding = rounding

    def forward(self, x: Tensor) -> Tensor:
        """The rounded values."""
        levels = levels_of(self.rounding.range_of(x), self.rounding.width)
        return levels.values(levels.nearest(x))


class CodedLayerWeight(nn.Module):
    """DequantizeLinear of a weight's codes, for torch's exporter.

    Attributes:
        dim: the dimension of the output channels.
    """

    codes: Tensor
    scale: Tensor

    def __init__(self, coded: CodedWeight, dim: int | None) -> None:
        super().__init__()
        self.dim = dim
        self.set(coded)

    def set(self, coded: CodedWeight) -> None:
        """Hold a weight."""
        self.coded, self.bits = coded, coded.bits
        self.register_buffer("codes", coded.codes)
        self.register_buffer("scale", coded.scale.flatten().float() if self.dim is not None else coded.scale.float())
        self.register_buffer("center", None if coded.center is None else coded.center.float())

    def forward(self) -> Tensor:
        """The values; runs in torch's exporter only."""
        center: Any = self.center
        w: Tensor = torch.onnx.ops.symbolic(
            "DequantizeLinear",
            (self.codes, self.scale),
            {} if self.dim is None else {"axis": self.dim},
            dtype=torch.float32,
            shape=self.codes.shape,
            version=_OPSET,
            metadata_props={BITS: str(self.bits)},
        )
        return w if center is None else w + center


def _module_of(factor: FrozenFactor) -> nn.Module:
    if not factor.weight:
        return _MeasuredActivation(factor.rounding()) if factor.within is None else _QuantizedActivation(factor)
    assert factor.within is not None
    dim: Any = factor.quantizer.dim
    return CodedLayerWeight(CodedWeight.of(factor.rounded_weight(), factor.within, factor.bits), dim)


def _dynamic(x: Any) -> Any:
    """The dimensions that later calls may change: the batch, and the length of tokens and their masks."""
    if not isinstance(x, Tensor):
        return None
    tokens = x.ndim == 2 and not x.is_floating_point()
    return {dim: Dim.AUTO for dim in range(2 if tokens else min(1, x.ndim))}


def _name_sizes(model: ir.Model) -> None:
    """Name the sizes that later calls may change ``batch`` and ``length``; torch's exporter numbers them (``s72``)."""
    import onnx_ir as ir

    names: dict[str, str] = {}
    for model_input in model.graph.inputs:
        for size, name in zip(model_input.shape or (), ("batch", "length"), strict=False):
            if isinstance(size, ir.SymbolicDim):
                names.setdefault(str(size.value), name)
    if not names:
        return
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")  # also inside sizes such as 2*s72
    results = [value for node in ir.traversal.RecursiveGraphIterator(model.graph) for value in node.outputs]
    for value in (*model.graph.inputs, *results):
        if value.shape is not None:
            value.shape = ir.Shape(
                [
                    pattern.sub(lambda match: names[match[0]], size.value)
                    if isinstance(size, ir.SymbolicDim) and size.value
                    else size
                    for size in value.shape
                ]
            )


def _output_names(graph: GraphModule, inputs: tuple[Any, ...]) -> list[str]:
    """The names of fields where the output has fields."""
    with torch.no_grad():
        output = graph(*inputs)
    if isinstance(output, Mapping):
        return [
            name if count == 1 else f"{name}_{index}"
            for name, value in output.items()
            for count in [len(list(tensors_in(value)))]
            for index in range(count)
        ]
    count = len(list(tensors_in(output)))
    return ["output"] if count == 1 else [f"output_{index}" for index in range(count)]


def _reason(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
