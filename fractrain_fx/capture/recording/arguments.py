"""Turn the values that a call was given into the arguments of its node, and map what it returned to the node."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from keyword import iskeyword
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from fractrain_fx.capture.compare import copied
from fractrain_fx.capture.recording.memory import ARRAYS, KEPT, Memory, note_memory
from fractrain_fx.capture.recording.writer import UnrepresentableError, Writer
from fractrain_fx.capture.sizes.symbolic import READS, Symbol, has_symbols, plain, value_of
from fractrain_fx.capture.targets import function_node
from fractrain_fx.capture.trees import DISTRIBUTED, ValueList, fields_of, holds_tensor, leaves_in, map_tree

if TYPE_CHECKING:
    from fractrain_fx.capture.recording.effects import EffectWatch
    from fractrain_fx.capture.recording.recorder import Recorder

__all__ = ["argument", "map_results", "write_closed"]

_GIVEN = (Tensor, Symbol)
_HERE = object()  # the place of a tensor or a size among the arguments of a call

_LITERALS = (str, bool, int, float, complex, type(None), type(...), torch.dtype, torch.layout, torch.memory_format)


def argument(writer: Writer, value: Any, cut: bool = False) -> Any:
    """A value as a node's argument; ``UnrepresentableError`` if a part of it has no form in generated code.

    With ``cut`` the model has switched gradients off, so tensors enter detached. Whether one needs a gradient now does
    not matter: in a later call it may.
    """
    if isinstance(value, Tensor):
        node = writer.node_of(value)
        return writer.detached(node) if cut and (value.is_floating_point() or value.is_complex()) else node
    if isinstance(value, Symbol):
        return _size(writer, value)
    if isinstance(value, ValueList):
        return _present(value.source)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.device):
        return writer.device(value)
    if isinstance(value, (Node, *_LITERALS)):
        return value
    if isinstance(value, range):
        return tuple(value)
    if isinstance(value, torch.Size) and writer.returning:
        return _built(writer, torch.Size, (tuple(argument(writer, part, cut) for part in value),), {})
    if isinstance(value, (tuple, list)):
        parts = [argument(writer, part, cut) for part in value]
        if isinstance(value, list):
            return parts
        return _built(writer, type(value), parts, {}) if hasattr(type(value), "_fields") else tuple(parts)
    if isinstance(value, slice):
        return slice(*(argument(writer, part, cut) for part in (value.start, value.stop, value.step)))
    if type(value) is dict:
        return {
            key: writer.device(torch.device(part))
            if key == "device" and isinstance(part, (str, int))
            else argument(writer, part, cut)
            for key, part in value.items()
        }
    return _object(writer, value, cut)


def _present(node: Node) -> Node:
    """A node that reads values from a tensor, if it is still there."""
    if node._erased:
        raise UnrepresentableError("number that a part of it read from a tensor")
    return node


def _size(writer: Writer, value: Symbol) -> Any:
    """A size, or a number computed from sizes, as a node that computes it for the sizes at hand."""
    if value.op is value_of:
        return _present(value.operands[0])
    if value.op in READS:
        node = writer.known(value.operands[0])
        if node is None:
            return plain(value)
        read, operands = READS[value.op], (node, value.operands[1])
        return writer.once((read, operands), lambda: writer.create("call_method", read, operands))
    parts = tuple(_size(writer, x) if isinstance(x, Symbol) else x for x in value.operands)
    if not any(isinstance(x, Node) for x in parts):
        return plain(value)
    return writer.once((value.op, parts), lambda: writer.create("call_function", value.op, parts))


def _object(writer: Writer, value: Any, cut: bool) -> Any:
    """An instance that holds tensors, rebuilt by a call of its class."""
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        parts = {key: argument(writer, part, cut) for key, part in value.items()}
        names = all(key.isidentifier() and not iskeyword(key) for key in parts)
        if names and isinstance(value, OrderedDict) and [*type(value)(**value)] != [*value]:
            return _built(writer, _in_order_of(type(value)), (), parts, type(value).__name__)
        return _built(writer, type(value), (), parts) if names else _built(writer, type(value), (parts,), {})
    if isinstance(value, DISTRIBUTED):
        return _rebuilt(writer, value, cut)
    fields = dict(fields_of(value))
    if fields and (holds_tensor(value) or has_symbols(fields)):
        wanted = [field.name for field in dataclasses.fields(value) if field.init]
        return _built(writer, type(value), (), {name: argument(writer, getattr(value, name), cut) for name in wanted})
    leaves, spec = pytree.tree_flatten(value)
    if leaves == [value] or not holds_tensor(leaves):
        raise UnrepresentableError(type(value).__name__)
    held = (argument(writer, part, cut) for part in leaves)
    return _built(writer, lambda *values: pytree.tree_unflatten(values, spec), held, {}, type(value).__name__)


def _in_order_of(kind: type[OrderedDict[str, Any]]) -> Callable[..., Any]:
    """Builds outputs of a class that sorts its keys, and gives them the order that forward had filled them in."""

    def build(**parts: Any) -> Any:
        output = kind(**parts)
        for key in parts:
            output.move_to_end(key)
        return output

    return build


def _rebuilt(writer: Writer, value: Any, cut: bool) -> Node:
    """A distribution of torch, or a transform, with the tensors and sizes of the run at hand."""
    state = value.__getstate__() if isinstance(value, torch.distributions.Transform) else vars(value)
    held: dict[str, Any] = {}
    for name, part in state.items():
        with contextlib.suppress(UnrepresentableError):  # constraints, which are the same for all values
            held[name] = argument(writer, part, cut)
    kind, fixed = type(value), {name: part for name, part in state.items() if name not in held}

    def rebuild(**parts: Any) -> Any:
        instance = object.__new__(kind)
        vars(instance).update(fixed | parts)
        return instance

    return _built(writer, rebuild, (), held, kind.__name__)


def _built(
    writer: Writer, make: Callable[..., Any], args: Iterable[Any], kwargs: dict[str, Any], name: str = ""
) -> Node:
    """A node that makes a container of its operands, in whose memory the container's tensors lie."""
    # Code generation fails for a class as argument or target of a node, but not for a function that calls it.
    node = writer.create("call_function", function_node(make, name or make.__name__), tuple(args), kwargs)
    note_memory(node, Memory(shares=frozenset([*range(len(node.args)), *node.kwargs])))
    return node


def map_results(writer: Writer, result: Any, node: Node, taken: set[int], in_place: set[int], cut: bool = False) -> Any:
    """Map the tensors in a call's result to its node; ``cut`` says that the call ran with gradients switched off.

    ``taken`` has the identities of the call's arguments, ``in_place`` of those that it changed. The result has a new
    tensor object for each argument that was returned unchanged: two nodes must not share one object, or users of the
    argument would read it from this call.
    """

    def part_of(part: Any, follow: Callable[..., Any], key: Any) -> Any:
        if not holds_tensor(part):
            return part
        picked = writer.create("call_function", follow, (node, key))
        if node in writer.cut:
            writer.cut.add(picked)
        return map_results(writer, part, picked, taken, in_place, cut)

    if isinstance(result, Tensor):
        if id(result) in in_place or (node.op == "call_method" and str(node.target).endswith("_")):
            return result
        if id(result) in taken or writer.known(result) is not None or writer.owned(result):
            result = torch.ops.aten.alias.default(result)
        has_history = cut and (result.is_floating_point() or result.is_complex())
        writer.bind(result, writer.detached(node) if has_history else node)
        return result
    if isinstance(result, (tuple, list)):
        parts = [part_of(part, operator.getitem, i) for i, part in enumerate(result)]
        if all(a is b for a, b in zip(parts, result, strict=True)):
            return result
        if isinstance(result, list):
            return parts
        return type(result)(*parts) if hasattr(type(result), "_fields") else type(result)(parts)
    items = result.items() if isinstance(result, Mapping) else fields_of(result)
    follow = operator.getitem if isinstance(result, Mapping) else getattr
    for key, part in items:
        part_of(part, follow, key)
    return result


def write_closed(
    recorder: Recorder,
    name: str,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    result: Any,
    watched: EffectWatch,
) -> Any:
    """Write a call by a closure that keeps all arguments but tensors and sizes."""
    operands = [leaf for leaf in leaves_in((args, dict(kwargs))) if isinstance(leaf, _GIVEN)]
    template = map_tree((args, dict(kwargs)), lambda leaf: _HERE if isinstance(leaf, _GIVEN) else leaf)

    def call(*values: Any) -> Any:
        left = iter(values)
        own_args, own_kwargs = map_tree(template, lambda leaf: next(left) if leaf is _HERE else leaf)
        return func(*own_args, **own_kwargs)

    arrays = [(leaf, copied(leaf)) for leaf in leaves_in((args, dict(kwargs))) if isinstance(leaf, ARRAYS)]
    before = recorder.writer.last
    mapped = recorder.write(
        "call_function", function_node(call, name.strip("_") or "call"), tuple(operands), {}, result, watched
    )
    written = recorder.writer.last
    if arrays and written is not before and isinstance(result, Tensor):
        written.meta[KEPT] = arrays
    return mapped
