"""Make one op of a branch's last batch norm and the skip after it, for the copy of the graph that runs."""

from __future__ import annotations

from functools import partial

from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fractrain_fx.errors import PassError
from fractrain_fx.execution.blocks.skipped_norm import SkippedNorm, is_plain_norm
from fractrain_fx.nn.gates import Skip
from fractrain_fx.passes.graph.edit import call, insert_module, original_at, owner_module
from fractrain_fx.passes.graph.facts import facts

__all__ = ["FuseSkips"]


class FuseSkips(PassBase):
    """Replace each batch norm that only a skip reads, and that skip, by one :class:`SkippedNorm`.

    Requires: a graph with gates. Ensures: the outputs are the same bit for bit, gradients up to the order of sums; no
    norm is left that only a skip reads.
    """

    def requires(self, graph_module: GraphModule) -> None:
        for node in graph_module.graph.nodes:
            if facts(node).role == "skip" and len(node.args) != 2:
                raise PassError(f"the skip {node.name!r} reads {len(node.args)} values, not a branch and a choice")

    def call(self, graph_module: GraphModule) -> PassResult:
        skips = [node for node in graph_module.graph.nodes if _norm_of(graph_module, node) is not None]
        for skip in skips:
            norm, choice = skip.args
            assert isinstance(norm, Node)
            module = graph_module.get_submodule(str(skip.target))
            assert isinstance(module, Skip)
            path = f"fused.{str(skip.target).rpartition('.')[2]}_norm"
            insert_module(graph_module, path, partial(SkippedNorm, original_at(graph_module, norm), module))
            with graph_module.graph.inserting_before(skip):
                fused = call(
                    graph_module.graph,
                    path,
                    [norm.args[0], choice],
                    role="skip",
                    owner=facts(skip).owner or "",
                    like=skip,
                )
            skip.replace_all_uses_with(fused)
            graph_module.graph.erase_node(skip)
            graph_module.graph.erase_node(norm)
        graph_module.graph.lint()
        graph_module.recompile()
        return PassResult(graph_module, bool(skips))


def _norm_of(graph_module: GraphModule, skip: Node) -> Node | None:
    """The batch norm that a skip reads, if the two can be one op."""
    if facts(skip).role != "skip" or not isinstance(owner_module(graph_module, skip), Skip):
        return None
    norm = skip.args[0]
    if not isinstance(norm, Node) or len(norm.users) > 1 or len(norm.args) != 1 or norm.kwargs:
        return None
    module, batch = owner_module(graph_module, norm), facts(norm).batch
    plain = module is not None and is_plain_norm(module) and batch is not None and not batch.whole
    return norm if plain and batch is not None and (batch.axis, batch.factor) == (0, 1) else None
