"""Count the cost of calls whose sizes are not those of the recorded example."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from fractrain_fx.capture import RecordedModule, Recording
from fractrain_fx.capture.inputs.data import without_data
from fractrain_fx.capture.recording.regions import REGION_EDGES, NodeByNode
from fractrain_fx.capture.source import warn
from fractrain_fx.capture.state import preserved_random_state
from fractrain_fx.capture.trees import map_tensors
from fractrain_fx.config import FracConfig
from fractrain_fx.errors import ModelError
from fractrain_fx.execution.arithmetic import Bound
from fractrain_fx.nn.cost import CostMeter
from fractrain_fx.passes import MeterCost, facts, ops_of
from fractrain_fx.passes.analyse.macs import macs_of
from fractrain_fx.passes.graph.tensors import QUANTIZERS

if TYPE_CHECKING:
    from fractrain_fx.model.recordings.variant import SampleCount

__all__ = ["CostsBySize", "costs_of"]

_REFUSED = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ModelError)

Sizes = tuple[tuple[int, ...], ...]


class CostsBySize:
    """Gives a graph's cost meter the MACs of a sample of each call's sizes.

    At the first call of a size the graph runs once on tensors without data, which takes about as long as Python takes
    for a step. A graph that needs data for that keeps the costs of its example, with a warning.

    Args:
        graph_module: a shown graph.
        config: of its model.
        example: its sizes, the values for its inputs, and the number of samples in them, if there are any.

    Attributes:
        now: the sizes at which the meter counts.
    """

    def __init__(
        self, graph_module: RecordedModule, config: FracConfig, example: tuple[Sizes, Sequence[Any], int | None]
    ) -> None:
        self._graph_module, self._config = graph_module, config
        self._example = example
        self.now = example[0]
        self._meters: dict[Sizes, CostMeter] = {}
        self._counter: _Counter | None = None
        self._refused = False

    @torch.inference_mode(False)
    def follow(self, sizes: Sizes, values: Sequence[Any], samples: int | None) -> None:
        """Let the next forward be counted at the sizes of a call, other ones than now."""
        if not self._meters:
            self._meters[self._example[0]] = copy.deepcopy(self._meter)
        if sizes not in self._meters:
            self._meters[sizes] = self._counted(values, samples) or self._meters[self._example[0]]
        self._meter.take(self._meters[sizes].to(self._meter.full.device))
        self.now = sizes

    def prepare(self) -> None:
        """Make the copy that counts. Sharded parameters cannot be copied, so this comes before."""
        with contextlib.suppress(*_REFUSED):  # told of at the first call of another size
            self._counter = self._counter or _Counter(self._graph_module, *self._example[1:])

    def forget(self) -> None:
        """Count anew: the costs of the ops have changed. The meter gets the numbers of the example by other means."""
        self._meters.clear()
        self.now = self._example[0]

    def use_example(self) -> None:
        """Give the meter the numbers of the example's sizes."""
        if self.now != self._example[0]:
            self.follow(*self._example)

    @cached_property
    def _meter(self) -> CostMeter:
        node = next(node for node in self._graph_module.graph.nodes if facts(node).role == "cost")
        meter = self._graph_module.get_submodule(str(node.target))
        assert isinstance(meter, CostMeter)
        return meter

    def _counted(self, values: Sequence[Any], samples: int | None) -> CostMeter | None:
        """The costs of a sample of a call; ``None``, with a warning, if counting them needs data."""
        if self._refused:
            return None
        try:
            self._counter = self._counter or _Counter(self._graph_module, *self._example[1:])
            return self._counter.meter(self._config, self._meter.blocks, values, samples)
        except _REFUSED as error:
            words = str(error) or type(error).__name__
            self._refused, cause = True, words.splitlines()[0].partition(". ")[0].rstrip(".")
            warn(
                "costs (MACs, cp) of samples of other sizes than the example's are counted as its, because counting "
                f"theirs without data fails: {cause}. Pass example_inputs or example_kwargs of the size that you train "
                "on"
            )
            return None


def costs_of(recording: Recording, config: FracConfig, count: SampleCount) -> dict[bool, CostsBySize]:
    """The costs of a recording in training (``True``) and evaluation."""
    samples = count(recording.inputs)
    example = count.sizes(recording.inputs, samples), recording.inputs, samples
    modes = [CostsBySize(shown, config, example) for shown in recording.graphs]
    return {True: modes[0], False: modes[-1]}


class _Counter(NodeByNode):
    """A copy of a graph without data, which learns the shapes of a call.

    Raises:
        ModelError: it counts other MACs for the example than the passes did.
    """

    def __init__(self, graph_module: RecordedModule, values: Sequence[Any], samples: int | None) -> None:
        memo: dict[int, Any] = {}
        for x in (*graph_module.parameters(), *graph_module.buffers()):
            empty = torch.empty(x.shape, dtype=x.dtype, device="meta")
            memo[id(x)] = nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty
        for module in graph_module.modules():  # hooks may do anything beside computing
            memo.update({id(hooks): OrderedDict() for hooks in (module._forward_hooks, module._forward_pre_hooks)})
        self._shown = graph_module
        self._counted = copy.deepcopy(graph_module, memo)
        super().__init__(self._counted)
        for node in self._counted.graph.nodes:
            record = node.meta["frac"] = copy.copy(facts(node))
            record.op = copy.copy(record.op)
        self._count(values, samples)
        for (_, here), (_, there) in zip(ops_of(self._counted.graph), ops_of(graph_module.graph), strict=True):
            if here.macs != there.macs:
                raise ModelError(f"op {here.name!r} gets {here.macs} MACs for the example instead of {there.macs}")

    def meter(self, config: FracConfig, blocks: Sequence[str], values: Sequence[Any], samples: int | None) -> CostMeter:
        """The meter of a call's sizes, for the parameters that are trained now."""
        self._count(values, samples)
        for (_, here), (_, there) in zip(ops_of(self._counted.graph), ops_of(self._shown.graph), strict=True):
            here.input_gradient, here.weight_gradient = there.input_gradient, there.weight_gradient
        return MeterCost(config).meter(self._counted, blocks)

    @torch.no_grad()
    def _count(self, values: Sequence[Any], samples: int | None) -> None:
        for node in self._counted.graph.nodes:
            if facts(node).samples is not None:
                facts(node).samples = samples
        with preserved_random_state(), torch.device("meta"):  # tensors that the graph makes have no data either
            self.run(*without_data(list(values)))
        for node, op in ops_of(self._counted.graph):
            op.macs = macs_of(self._counted, node)

    def run_node(self, n: Node) -> Any:
        record = facts(n)
        if record.role == "cost" or n.op == "output" or n.target in REGION_EDGES:
            return None
        source = n.args[0] if n.args else None
        if record.role in QUANTIZERS and isinstance(source, Node):
            value = self.env[source]
        elif record.op is not None and (record.op.kind == "grouped_mm" or record.role == "fused"):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            if record.op.kind == "grouped_mm":
                args, kwargs = map_tensors((args, kwargs), _half)
            value = self._product(n, args, kwargs).to(record.dtype)
        else:
            value = super().run_node(n)
        if record.shape is not None:
            record.shape = tuple(value.shape)
        return value

    def _product(self, n: Node, args: Any, kwargs: Any) -> Tensor:
        """The product of a node, whose factors are not rounded."""
        if callable(n.target):
            return n.target(*args, **kwargs)  # type: ignore[no-any-return]
        plan = self.fetch_attr(str(n.target)).plan
        return plan.arithmetic.forward(Bound(kwargs["a"], kwargs["b"], kwargs["added"], plan.static))  # type: ignore[no-any-return]


def _half(x: Tensor) -> Tensor:
    """Without data torch takes no other type for groups of products."""
    return x.bfloat16() if x.is_floating_point() else x
