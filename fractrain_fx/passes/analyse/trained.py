"""Find which backward products (EB, GC) each op needs for the parameters that are trained now.

Each node has a mask with one bit for each parameter through which a gradient would reach it. With the masks, the
present ``requires_grad`` of the parameters tells which ops need EB and GC without another walk over the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

from torch import nn
from torch.fx import GraphModule

from fractrain_fx.capture.trees import tensors_in
from fractrain_fx.passes.graph.facts import facts, ops_of

__all__ = ["Place", "bits_of", "find_trained", "follow_trained", "places_of", "trained_now", "training_macs"]

_ALWAYS = 1  # the bit of inputs that require a gradient
_NAMES = "parameters"  # key of ``graph_module.meta``: names in the order of their bits

Place = tuple[dict[str, nn.Parameter | None], str]
"""The dictionary that holds a parameter, and its name there. A move of the model may put another object there."""


def places_of(graph_module: GraphModule) -> list[Place]:
    """The places of an analysed graph's parameters, in the order of their bits."""
    places: list[Place] = []
    for name in graph_module.meta.get(_NAMES, ()):
        owner, _, leaf = name.rpartition(".")
        parameters = graph_module.get_submodule(owner)._parameters
        # A TorchScript module has no dictionary, and keeps its parameters when it is moved.
        places.append((parameters if isinstance(parameters, dict) else dict(parameters.items()), leaf))
    return places


def trained_now(places: Sequence[Place]) -> list[bool]:
    """Whether the parameter at each place is trained; one that is kept as codes is not."""
    return [(p := parameters.get(name)) is not None and p.requires_grad for parameters, name in places]


def find_trained(graph_module: GraphModule, example: str) -> None:
    """Note on every node through which parameters a gradient can reach it, and whether one does now.

    The graph was run with every parameter trained, so that its nodes have ``flows``; ``example`` is the key of
    ``node.meta`` with the example value of a placeholder.
    """
    named = dict(graph_module.named_parameters())
    graph_module.meta[_NAMES] = tuple(named)
    bits = {id(parameter): 1 << bit for bit, parameter in enumerate(named.values(), start=1)}
    now = _now(graph_module)
    for node in graph_module.graph.nodes:
        record = facts(node)
        mask = 0
        if node.op == "placeholder":
            mask = _ALWAYS * any(x.requires_grad for x in tensors_in(node.meta[example]))
        elif node.op == "get_attr":
            value = attrgetter(str(node.target))(graph_module)
            mask = bits.get(id(value), _ALWAYS * bool(getattr(value, "requires_grad", False)))
        else:
            for source in node.all_input_nodes:
                mask |= facts(source).trained_by
        if node.op == "call_module":
            mask |= _mask(graph_module.get_submodule(str(node.target)), bits)
        record.trained_by = mask if record.flows else 0
        record.requires_grad = bool(record.trained_by & now)


def follow_trained(graph_module: GraphModule) -> None:
    """Update which gradients the ops of a graph compute, from the present ``requires_grad`` of its parameters."""
    now = _now(graph_module)
    for node, op in ops_of(graph_module.graph):
        by = facts(node).gradients_by
        if by is not None:
            op.input_gradient, op.weight_gradient = bool(by[0] & now), bool(by[1] & now)


def training_macs(graph_module: GraphModule) -> tuple[int, int]:
    """Full-precision MACs (FW, EB, GC) of training on one sample: now, and with every parameter trained."""
    now = everything = 0
    for node, op in ops_of(graph_module.graph):
        by = facts(node).gradients_by
        if by is not None and op.macs:
            now += sum(op.training_macs)
            everything += op.macs * (1 + bool(by[0]) + bool(by[1]))
    return now, everything


def bits_of(graph_module: GraphModule, module: nn.Module) -> int:
    """The bits of a module's parameters."""
    places = enumerate(places_of(graph_module), start=1)
    return _mask(module, {id(parameters[name]): 1 << bit for bit, (parameters, name) in places})


def _mask(module: nn.Module, bits: Mapping[int, int]) -> int:
    mask = 0
    for parameter in module.parameters():
        mask |= bits.get(id(parameter), _ALWAYS * parameter.requires_grad)
    return mask


def _now(graph_module: GraphModule) -> int:
    flags = trained_now(places_of(graph_module))
    return _ALWAYS + sum(1 << bit for bit, trained in enumerate(flags, start=1) if trained)
