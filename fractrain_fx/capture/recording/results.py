"""Map the tensors that a call returned to its node."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fractrain_fx.capture.recording.writer import Writer
from fractrain_fx.capture.trees import fields_of, holds_tensor

__all__ = ["map_results"]


def map_results(writer: Writer, result: Any, node: Node, taken: set[int], in_place: set[int], cut: bool = False) -> Any:
    """Map the tensors in a call's result to its node.

    Args:
        writer: gets the node of each tensor.
        result: the result of the call.
        node: the call's node.
        taken: identities of the call's arguments.
        in_place: identities of the arguments that the call changed.
        cut: whether the results were computed with gradients switched off.

    Returns:
        ``result``, with a new tensor object for each argument that was returned unchanged. Two nodes must not share
        one object, or users of the argument would read it from this call.
    """

    def part_of(part: Any, follow: Callable[..., Any], key: Any) -> Any:
        if not holds_tensor(part):
            return part
        picked = writer.create("call_function", follow, (node, key))
        if writer.is_cut(node):
            writer.mark_cut(picked)
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
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
    items = result.items() if isinstance(result, Mapping) else fields_of(result)
    follow = operator.getitem if isinstance(result, Mapping) else getattr
    for key, part in items:
        part_of(part, follow, key)
    return result
