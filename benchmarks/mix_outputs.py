"""Mix the outputs of a block instead of its inputs, as the authors' code does: run it once for each option.

This is a slow reference: ``fractrainify(model, config=config, passes=mixing_passes(config))``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fractrain_fx.capture import changes_operands
from fractrain_fx.config import FracConfig
from fractrain_fx.config.precision import Precision
from fractrain_fx.errors import ModelError, PassError
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.nn.quantizers import MixedGradientQuantizer, picked
from fractrain_fx.passes import Quantize, default_passes
from fractrain_fx.passes.graph.edit import NAMESPACE, call, insert_module, varying
from fractrain_fx.passes.graph.facts import Block, blocks_of, choices_of, facts

__all__ = ["MixOutputs", "mixing_passes"]


def mixing_passes(config: FracConfig) -> list[PassBase]:
    """The default passes, with the mixing of outputs behind the one that it changes."""
    chain = default_passes(config)
    chain.insert(next(place for place, each in enumerate(chain) if isinstance(each, Quantize)) + 1, MixOutputs(config))
    return chain


class MixOutputs(PassBase):
    """Compute each gated block at every option, for all samples, and let the choice pick among the results.

    The nodes from a block's quantize nodes to its exits are copied for each option. The copies share
    modules and parameters: a batch norm in a block sees the batch once for each option. Each copy's output gradients
    are rounded for the samples that picked its option and exactly zero for the others.

    Requires: gated blocks with their quantize nodes. Ensures: no quantize node follows a choice any more.
    """

    def __init__(self, config: FracConfig) -> None:
        super().__init__()
        self.config = config

    def requires(self, graph_module: GraphModule) -> None:
        choices = choices_of(graph_module.graph)
        for block in blocks_of(graph_module.graph):
            if block.gated and block.name not in choices:
                raise PassError(f"block {block.name!r} has no gate yet: run InsertGates first")

    def call(self, graph_module: GraphModule) -> PassResult:
        choices = choices_of(graph_module.graph)
        for block in blocks_of(graph_module.graph):
            if block.gated:
                _Mixing(graph_module, block, choices[block.name], self.config).write()
        graph_module.graph.lint()
        return PassResult(graph_module, bool(choices))

    def ensures(self, graph_module: GraphModule) -> None:
        for choice in choices_of(graph_module.graph).values():
            for user in choice.users:
                if facts(user).role in ("input", "gradient", "skip"):
                    raise PassError(f"{user.name!r} still mixes the options of {choice.name!r}")


@dataclass(frozen=True)
class _Exit:
    """A value that leaves the copied part of a block.

    Attributes:
        node: gives the value.
        axis: its batch axis.
        options: numbers of the options that it is computed at.
        part: the copied nodes that the value is computed from, ``node`` included.
    """

    node: Node
    axis: BatchAxis
    options: tuple[int, ...]
    part: frozenset[Node]


class _Mixing:
    """The copies of one block."""

    def __init__(self, graph_module: GraphModule, block: Block, choice: Node, config: FracConfig) -> None:
        self._graph_module, self._graph = graph_module, graph_module.graph
        self._block, self._choice, self._config = block, choice, config
        self._quantizers = [user for user in choice.users if facts(user).role in ("input", "gradient")]
        self._skips = [user for user in choice.users if facts(user).role == "skip"]
        self._moving = varying(self._graph)  # a node that only takes a size from a block is not part of it
        self._controls: dict[tuple[Callable[[Tensor, int], Tensor], int], Node] = {}

    def write(self) -> None:
        region = self._region()
        self._refuse(region)
        exits = [self._exit(node, region) for node in self._frontier(region)]
        copies: dict[int, dict[Node, Node]] = {}
        behind = {node for each in exits for node in each.part}
        for node in [node for node in self._graph.nodes if node in behind]:
            # The node itself computes the first option, and copies compute the others.
            first, *others = sorted({option for each in exits if node in each.part for option in each.options})
            copies.setdefault(first, {})[node] = node
            latest = node
            for option in others:
                latest = self._copied(node, option, copies.setdefault(option, {}), latest)
            if node in self._quantizers:
                self._fix(node, first, node)
        for each in exits:
            self._mix(each, region, [copies[option][each.node] for option in each.options])

    def _region(self) -> set[Node]:
        """The nodes from the quantize nodes to the residual add, or to the last op of a block without a skip path."""
        if self._block.skip is not None:
            stop = {node for node in self._graph.nodes if node.name == self._block.exit} | set(self._skips)
            return _reached(self._quantizers, stop, self._readers)
        ends = [node for node in self._quantizers if facts(node).role == "gradient"]
        behind = _reached(ends, set(), lambda node: node.all_input_nodes)
        return _reached(self._quantizers, set(), self._readers) & behind

    def _readers(self, node: Node) -> list[Node]:
        return [user for user in node.users if user in self._moving or facts(user).role is not None]

    def _refuse(self, region: set[Node]) -> None:
        where = f"outputs cannot be mixed, for want of a copy of block {self._block.name!r}"
        for node in region:
            record = facts(node)
            if record.role in ("gate", "choice", "cost"):
                raise ModelError(f"{where}: block {record.owner!r} begins inside it. Use default_passes")
            first = node.args[0] if node.args else None
            if isinstance(first, Node) and first not in region and changes_operands(node):
                raise ModelError(f"{where}: {node.name!r} changes a value from outside in place. Use default_passes")

    def _frontier(self, region: set[Node]) -> list[Node]:
        return [
            node
            for node in self._graph.nodes
            if node in region and any(reader not in region for reader in self._readers(node))
        ]

    def _exit(self, node: Node, region: set[Node]) -> _Exit:
        axis = facts(node).batch
        if axis is None:
            raise ModelError(
                f"outputs cannot be mixed: {node.name!r}, which leaves block {self._block.name!r}, has no row "
                "for each sample. Use default_passes"
            )
        part = _reached([node], set(), lambda each: each.all_input_nodes) & region
        options = self._options(part)
        computes = tuple(number for number, option in enumerate(options) if not option.skips)
        return _Exit(node, axis, computes, frozenset(part))

    def _options(self, nodes: Iterable[Node]) -> Sequence[Precision]:
        ops = [record.op for node in nodes if (record := facts(node)).op is not None]
        on_skip_path = any(op.skip_path for op in ops if op is not None)
        return self._config.projection_options if on_skip_path else self._config.gate_options

    def _copied(self, node: Node, option: int, made: dict[Node, Node], after: Node) -> Node:
        """A copy of a node that reads the copies for one option."""
        with self._graph.inserting_after(after):
            copied = self._graph.node_copy(node, lambda each: made.get(each, each))
        copied.meta = {**node.meta, "frac": replace(facts(node), op=None, blocks=())}
        made[node] = copied
        if node in self._quantizers:
            self._fix(copied, option, node)
        return copied

    def _fix(self, node: Node, option: int, original: Node) -> None:
        """Let a quantize node round at one option: activations of all samples, gradients of samples that picked it."""
        path = str(original.target).removeprefix(f"{NAMESPACE}.")
        mixed = self._graph_module.get_submodule(f"{NAMESPACE}.{path}")
        gradient = isinstance(mixed, MixedGradientQuantizer)
        node.update_arg(1, self._control(takers if gradient else every, option))
        if not isinstance(mixed, MixedGradientQuantizer):
            return
        bits = int(mixed.options[option])
        make = partial(MixedGradientQuantizer, mixed.fmt, (0, bits), mixed.axis, mixed.stream + option)
        parent, _, name = path.rpartition(".")
        insert_module(self._graph_module, f"{parent}.{name}_option{option}", make)
        node.target = f"{NAMESPACE}.{parent}.{name}_option{option}"

    def _control(self, function: Callable[[Tensor, int], Tensor], option: int) -> Node:
        if (function, option) not in self._controls:
            with self._graph.inserting_after(self._choice):
                made = self._graph.call_function(function, (self._choice, option))
            facts(made).role, facts(made).owner = "bits", self._block.name
            self._controls[function, option] = made
        return self._controls[function, option]

    def _mix(self, leaving: _Exit, region: set[Node], results: list[Node]) -> None:
        node = leaving.node
        path = f"mixes.{node.name}"
        insert_module(self._graph_module, path, partial(Mix, leaving.axis, leaving.options))
        with self._graph.inserting_after(results[-1]):
            mixed = call(self._graph, path, [self._choice, *results], role="mix", owner=self._block.name, like=node)
        for user in [user for user in self._readers(node) if user not in region and user is not mixed]:
            if user in self._skips:  # samples that skip are in none of the results
                user.replace_all_uses_with(mixed)
                self._graph.erase_node(user)
            elif user not in results:
                user.replace_input_with(node, mixed)


def _reached(start: Iterable[Node], stop: set[Node], following: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """All nodes that can be reached, ``start`` included and ``stop`` left out."""
    found: set[Node] = set()
    pending = [node for node in start if node not in stop]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += [each for each in following(node) if each not in stop]
    return found


def every(choice: Float[Tensor, "batch options"], option: int) -> Int[Tensor, " batch"]:
    """One option for all samples, in the form that :func:`picked` returns."""
    return torch.full((len(choice),), option, device=choice.device)


def takers(choice: Float[Tensor, "batch options"], option: int) -> Int[Tensor, " batch"]:
    """1 for the samples that picked an option, 0 for the others."""
    return (picked(choice) == option).long()


class Mix(nn.Module):
    """Sum a block's outputs at several options, weighted by each sample's choice.

    Args:
        batch: where the samples of the results lie.
        options: the number of each result's option.
    """

    def __init__(self, batch: BatchAxis, options: Sequence[int]) -> None:
        super().__init__()
        self.batch = batch
        self.options = tuple(options)

    def forward(self, choice: Float[Tensor, "batch options"], *results: Tensor) -> Tensor:
        """``sum_k choice_k * result_k``; the shape and type of a result."""
        parts = zip(self.options, results, strict=True)
        mixed = [self.batch.expand(choice[:, k].to(x.dtype), x.shape) * x for k, x in parts]
        total = mixed[0]
        for each in mixed[1:]:
            total = total + each
        return total
