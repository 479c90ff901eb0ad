"""Write a model's output structure as the graph's output: containers as they are, classes through a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Size, Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from fractrain_fx.capture.targets import function_node
from fractrain_fx.capture.writer import UnrepresentableError, Writer
from fractrain_fx.errors import CaptureError

__all__ = ["write_output"]


def write_output(writer: Writer, value: Any) -> None:
    """End the graph with ``value``.

    Raises:
        CaptureError: part of the output is an object that no call can rebuild from tensors.
    """
    writer.create("output", "output", (_part(writer, value, "output"),))


def _part(writer: Writer, value: Any, where: str) -> Any:
    if isinstance(value, Tensor):
        return writer.node_of(value)
    if type(value) in (tuple, list, Size):
        parts = [_part(writer, part, f"{where}[{i}]") for i, part in enumerate(value)]
        return parts if type(value) is list else tuple(parts)
    if isinstance(value, Mapping):
        items = {key: _part(writer, part, f"{where}[{key!r}]") for key, part in value.items()}
        if type(value) is dict:
            return items
        if all(isinstance(key, str) for key in items):
            # A class as an argument breaks code generation, so it becomes the function that is called.
            return _build(writer, type(value), (), items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _build(writer, type(value), tuple(_part(writer, part, where) for part in value), {})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        items = {name: _part(writer, getattr(value, name), f"{where}.{name}") for name in fields}
        return _build(writer, type(value), (), items)
    leaves, spec = pytree.tree_flatten(value)
    if not (len(leaves) == 1 and leaves[0] is value):
        parts = [_part(writer, part, where) for part in leaves]
        return writer.create("call_function", function_node(_unflatten(spec), type(value).__name__), tuple(parts))
    try:
        return writer.argument(value)
    except UnrepresentableError as error:
        raise CaptureError(
            f"the model returns a {error} at {where}, which a graph cannot rebuild: return tensors in tuples, lists, "
            "dictionaries or dataclasses, or switch that part of the output off in example_kwargs"
        ) from error


def _build(writer: Writer, kind: type[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
    return writer.create("call_function", function_node(kind, kind.__name__), args, kwargs)


def _unflatten(spec: pytree.TreeSpec) -> Any:
    return lambda *parts: pytree.tree_unflatten(parts, spec)
