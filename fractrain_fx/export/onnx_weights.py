"""How an ONNX file writes weights: types of 4 bits, and what a runtime computes once as it loads the file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["BITS", "adapt_weights"]

BITS = "fractrain_bits"
"""Marks the DequantizeLinear of a weight, with the bits of its codes."""

_CONVOLUTIONS = ("Conv", "ConvTranspose")
_PASSING = ("Relu", "Clip")  # onnxruntime takes these into the convolution before them


def adapt_weights(model: ir.Model, at_load: bool) -> None:
    """Give codes of at most 4 bits the type of 4 bits, and weights on request the form that suits onnxruntime.

    onnxruntime multiplies codes in a convolution only if QuantizeLinear reads the result. For others it computes
    DequantizeLinear of the weight at every call, but Cast and Mul, which give the same values, once as it loads the
    file. Convolutions in front of QuantizeLinear keep DequantizeLinear: onnxruntime would round their floats again.

    Args:
        model: of torch's exporter.
        at_load: write the weights for onnxruntime.
    """
    import onnx_ir as ir

    for node in list(model.graph):
        bits = node.metadata_props.pop(BITS, None)
        if bits is None:
            continue
        few = int(bits) <= 4
        if few:
            # torch's exporter cannot write tensors of this type.
            codes: Any = node.inputs[0]
            codes.const_value = ir.tensor(codes.const_value.numpy(), dtype=ir.DataType.INT4, name=codes.name)
            codes.dtype = ir.DataType.INT4
        if at_load and _multiplies_floats(node):
            _dequantize_at_load(model.graph, node)
        elif at_load and few:
            _widen_at_load(model.graph, node)


def _multiplies_floats(node: ir.Node) -> bool:
    """Whether a convolution reads a weight, and something else than QuantizeLinear reads the convolution."""
    readers = [reader for reader, _ in node.outputs[0].uses()]
    return any(reader.op_type in _CONVOLUTIONS and not _is_quantized(reader) for reader in readers)


def _is_quantized(node: ir.Node) -> bool:
    readers = [reader for reader, _ in node.outputs[0].uses()]
    if len(readers) == 1 and readers[0].op_type in _PASSING:
        return _is_quantized(readers[0])
    return bool(readers) and all(reader.op_type == "QuantizeLinear" for reader in readers)


def _dequantize_at_load(graph: ir.Graph, node: ir.Node) -> None:
    """Replace DequantizeLinear by Cast and Mul."""
    import onnx_ir as ir

    codes, scale = node.inputs[:2]
    assert codes is not None and scale is not None and scale.const_value is not None
    factors, axis = scale.const_value.numpy(), node.attributes.get("axis")
    if axis is not None:
        assert codes.const_value is not None
        ends = [1] * len(codes.const_value.shape)
        ends[axis.as_int()] = -1
        factors = factors.reshape(ends)
    name = f"{node.outputs[0].name}_scale"  # several weights may read one scale
    spread = ir.Value(name=name, const_value=ir.tensor(factors, name=name))
    graph.register_initializer(spread)
    cast = ir.node("Cast", [codes], attributes={"to": ir.DataType.FLOAT})
    product = ir.node("Mul", [cast.outputs[0], spread])
    graph.insert_before(node, [cast, product])
    old, new = node.outputs[0], product.outputs[0]
    new.type, new.shape = old.type, old.shape
    ir.convenience.replace_all_uses_with(old, new)
    graph.remove(node, safe=True)
    if not scale.uses():
        graph.initializers.pop(str(scale.name), None)


def _widen_at_load(graph: ir.Graph, node: ir.Node) -> None:
    """Let DequantizeLinear read codes of 8 bits, which onnxruntime has kernels for."""
    import onnx_ir as ir

    cast = ir.node("Cast", [node.inputs[0]], attributes={"to": ir.DataType.INT8})
    graph.insert_before(node, cast)
    node.replace_input_with(0, cast.outputs[0])
