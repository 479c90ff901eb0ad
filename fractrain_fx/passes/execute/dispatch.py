"""Let each block compute only the samples that do not skip it, for the copy of the graph that runs."""

from __future__ import annotations

from typing import cast

from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fractrain_fx.capture import RecordedModule
from fractrain_fx.execution.blocks.dispatched_block import DispatchedBlock
from fractrain_fx.passes.graph.branches import Part, ends_of, part_of
from fractrain_fx.passes.graph.edit import NAMESPACE, call, identifier, unique
from fractrain_fx.passes.graph.facts import Block, choices_of

__all__ = ["Dispatch", "undispatched"]


class Dispatch(PassBase):
    """Replace each branch that can be skipped, with its skip select and residual add, by one :class:`DispatchedBlock`.

    Values that other parts of the model read too stay outside and are computed for all samples. So are the ranges of
    the branch's inputs. A branch that must run for all samples (:func:`undispatched` says why) stays as it is.

    Requires: a graph with gates. Ensures: parameters, buffers and their names stay the same; so do the values if no
    sample is left out.

    Args:
        threshold: share of skipped samples (0..1) from which they are left out.
        place: path under ``frac.`` for the blocks of this graph.
    """

    def __init__(self, threshold: float, place: str = "dispatched") -> None:
        super().__init__()
        self._threshold, self._place = threshold, place

    def call(self, graph_module: GraphModule) -> PassResult:
        recorded = cast("RecordedModule", graph_module)
        choices = choices_of(recorded.graph)
        paths: set[str] = set()
        for end, block in ends_of(recorded.graph).items() if choices else ():
            part = part_of(recorded, block, end) if block.inseparable_because is None else block.inseparable_because
            if isinstance(part, Part):
                path = unique(f"{self._place}.{identifier(block.name)}", paths)
                paths.add(path)
                self._write(recorded, block, part, choices[block.name], path)
        graph_module.graph.lint()
        graph_module.recompile()
        return PassResult(graph_module, bool(paths))

    def _write(self, graph_module: RecordedModule, block: Block, part: Part, choice: Node, path: str) -> None:
        dispatched = DispatchedBlock(part.module(graph_module), part.given, part.axis, part.adding, self._threshold)
        dispatched.train(graph_module.training)
        # Replaces the block of an earlier copy of this graph.
        graph_module.add_submodule(f"{NAMESPACE}.{path}", dispatched)
        graph = graph_module.graph
        with graph.inserting_before(part.add):
            like = part.end if part.adding == "elsewhere" else part.add
            arguments = [choice, part.onto, *part.inputs]
            run = call(graph, path, arguments, role="dispatched", owner=block.name, like=like)
        like.replace_all_uses_with(run)
        if part.adding != "elsewhere":
            graph.erase_node(part.add)
        for node in reversed(part.nodes):
            graph.erase_node(node)


def undispatched(graph_module: GraphModule) -> dict[str, str]:
    """By name, the blocks whose branches run for all samples even if some skip, with the reason."""
    recorded = cast("RecordedModule", graph_module)
    reasons: dict[str, str] = {}
    for end, block in ends_of(recorded.graph).items():
        part = block.inseparable_because or part_of(recorded, block, end)
        if isinstance(part, str):
            reasons.setdefault(block.name, part)
    return reasons
