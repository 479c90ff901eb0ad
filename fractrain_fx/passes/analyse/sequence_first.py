"""Modules that take the sequence first, although the samples lie in that dimension of their inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from torch.fx import GraphModule, Node

from fractrain_fx.nn.quantized_leaf import QuantizedLeaf
from fractrain_fx.passes.graph.facts import facts

__all__ = ["samples_in_sequence", "sequence_first_parts", "sequence_first_words"]

_TAKERS = (nn.MultiheadAttention, nn.RNNBase)


def samples_in_sequence(graph_module: GraphModule) -> tuple[str, ...]:
    """Paths of attention and recurrent modules with ``batch_first=False`` that get the samples in dimension 0.

    Torch documents their inputs as (sequence, batch, features), so either the samples were looked for in the wrong
    dimension of the model's inputs, or the model gives these modules another layout than they expect. The graph needs
    the annotations of ``Shapes``.
    """
    parts = sequence_first_parts(graph_module)
    return tuple(path for path in parts if any(map(_samples_first, _inputs(graph_module, path))))


def sequence_first_parts(model: nn.Module) -> list[str]:
    """Paths of attention and recurrent modules with ``batch_first=False``."""
    modules = model.named_modules()
    return [path for path, module in modules if isinstance(module, _TAKERS) and not module.batch_first]


def sequence_first_words(paths: Sequence[str]) -> str:
    """The mistake at such modules, and the way out."""
    more = f" (and {len(paths) - 1} more)" if len(paths) > 1 else ""
    return (
        f"{paths[0]}{more} takes sequence-first inputs (batch_first=False: sequence, batch, features), and gets the "
        "samples in dimension 0. If dimension 1 of your inputs holds the samples, set RunConfig(batch_axis=1), "
        "otherwise set batch_first=True there"
    )


def _inputs(graph_module: GraphModule, path: str) -> Iterator[Node]:
    """The activations from outside that a module's own nodes, or the node of its call, read."""
    part = graph_module.get_submodule(path)

    def is_inside(node: Node) -> bool:
        if node.op == "call_module":  # with rounded weights it is called by a module around it
            called = graph_module.get_submodule(str(node.target))
            return (called.leaf if isinstance(called, QuantizedLeaf) else called) is part
        return path in node.meta.get("nn_module_stack", ())

    for node in filter(is_inside, graph_module.graph.nodes):
        yield from (source for source in node.all_input_nodes if not is_inside(source))


def _samples_first(node: Node) -> bool:
    record = facts(node)
    batch = record.batch
    return (
        record.flows
        and len(record.shape or ()) == 3
        and batch is not None
        and batch.axis == 0
        and not (batch.folded or batch.whole)
    )
