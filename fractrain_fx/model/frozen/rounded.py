"""A copy of the original whose weights have the values that the forward pass multiplied."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.fx import Node

from fractrain_fx.capture import RecordedModule
from fractrain_fx.errors import ConfigError, ModelError
from fractrain_fx.nn.quantized_leaf import QuantizedLeaf
from fractrain_fx.nn.quantizers import WeightQuantizer
from fractrain_fx.passes import facts
from fractrain_fx.passes.analyse.codable import readers_of
from fractrain_fx.passes.graph.edit import owner_module

__all__ = ["rounded_copy"]


@torch.no_grad()
def rounded_copy(original: nn.Module, graph_module: RecordedModule, exact: Collection[str]) -> nn.Module:
    """Copy a model, and round the copy's weights to the bits that they have in the present stage.

    Parameters in ``exact`` have rounded values already; rounding these again may move them by a last bit. A weight
    needs one rounded value: formats that round it anew for each product are refused, and weights that are read
    otherwise elsewhere.
    """
    copied = copy.deepcopy(original)
    readers = readers_of([graph_module])
    for name, parameter in original.named_parameters(remove_duplicate=False):
        if name in exact:
            continue
        values = [
            value for _, node in readers.get(id(parameter), []) for value in _values(graph_module, node, parameter)
        ]
        rounded = [value for value in values if value is not None]
        if not rounded:
            continue
        if len(rounded) < len(values) or not all(torch.equal(rounded[0], value) for value in rounded):
            raise ModelError(
                f"{name} is multiplied rounded in one place, and read in float or with other bits in another, so it "
                "has no one rounded value: take restore(), or give all of its uses one precision with a Pin"
            )
        copied.get_parameter(name).copy_(rounded[0])
    return copied


def _values(graph_module: RecordedModule, node: Node, parameter: nn.Parameter) -> Iterator[Tensor | None]:
    """The values in which a reader of a parameter, or its users, take it; ``None`` for the parameter as it is."""
    if node.op != "get_attr":
        module, value = owner_module(graph_module, node), None
        if isinstance(module, QuantizedLeaf):
            rounded = module.rounded(_bits(graph_module, node.args[0]))
            value = next((x for name, x in rounded.items() if attrgetter(name)(module.leaf) is parameter), None)
        yield value
        return
    for user in node.users:
        role = facts(user).role
        if role == "fused":
            raise ConfigError(
                f"{node.target} is rounded anew for each product that reads it, so it has no one rounded value: take "
                "restore(), or a format that rounds weights once, such as 'affine' with affine.ranges='tensor'"
            )
        quantizer = owner_module(graph_module, user)
        if isinstance(quantizer, WeightQuantizer):
            yield quantizer(parameter, _bits(graph_module, user.args[1]))
        else:
            yield None


def _bits(graph_module: RecordedModule, node: object) -> Tensor:
    assert isinstance(node, Node)
    bits: Tensor = attrgetter(str(node.target))(graph_module)
    return bits
