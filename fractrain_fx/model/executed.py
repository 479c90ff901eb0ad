"""The copy of a rewritten graph that runs: with fused ops and, on request, int8, torchao or skipped samples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fractrain_fx.capture import RecordedModule
from fractrain_fx.config import FracConfig
from fractrain_fx.config.products import PRODUCTS
from fractrain_fx.execution.backends.torchao import TORCHAO
from fractrain_fx.execution.codes.timing import Tuner
from fractrain_fx.execution.fused_op import FusedOp
from fractrain_fx.execution.gathered import Gathered, ParameterGroup
from fractrain_fx.execution.recomputed import Recomputed
from fractrain_fx.execution.torchao_kernels import kernel_of
from fractrain_fx.passes import execution_passes, fused_ops, not_on_int8, not_on_torchao, ops_of, unfused
from fractrain_fx.passes.execute.segments import Segment, chain, cut
from fractrain_fx.passes.execute.shared_code import SharedCode
from fractrain_fx.passes.graph.run import run_passes

__all__ = ["OpBackend", "Running", "Wrapping"]


class Wrapping(NamedTuple):
    """The wrappers of each segment; a field is ``None`` without its wrapper.

    ``checkpoint`` has options of ``torch.utils.checkpoint.checkpoint`` if backward is to run segments again,
    ``compiler`` those of ``torch.compile``; ``groups_of`` finds the parameters to gather for a segment, if they are
    sharded.
    """

    checkpoint: Mapping[str, Any] | None = None
    groups_of: Callable[[Segment], Sequence[ParameterGroup]] | None = None
    compiler: Mapping[str, Any] | None = None


class OpBackend(NamedTuple):
    """What computed an op when it ran last: ``backend``, and by name why quicker backends did not.

    ``backend`` is ``quantizers`` if the op runs as the graph shows it, ``None`` before it ran in eager mode. For an op
    that torchao may compute, ``products`` tells what computes each product in the present stage.
    """

    backend: str | None
    refused: dict[str, str]
    products: Mapping[str, str] = MappingProxyType({})


class Running:
    """A shown graph and its copy that runs, on the same modules and parameters.

    ``shown`` is rewritten, with its quantize nodes; ``config`` says how fused ops and skipped blocks run. ``place`` is
    the path under ``frac.`` for the modules that only the copy has; modules at the paths ``leaves`` were recorded as
    one node.
    """

    def __init__(
        self,
        shown: RecordedModule,
        config: FracConfig,
        tuner: Tuner,
        place: str = "dispatched",
        leaves: Collection[str] = (),
    ) -> None:
        self._shown, self._config, self._tuner, self._place = shown, config, tuner, place
        self._leaves = leaves
        self._segments: list[Segment] = []
        self._chains: dict[bool, tuple[Wrapping, RecordedModule]] = {}
        self.fused: dict[str, FusedOp] = {}
        self._code = ""
        self.graph_module = shown
        self.current()

    def current(self) -> RecordedModule:
        """The copy, made again if the shown graph was recompiled since the last call."""
        if not torch.compiler.is_compiling() and self._code is not self._shown._code:
            copied = RecordedModule.over(self._shown, self._shown._modules, copy.deepcopy(self._shown.graph))
            run_passes(copied, execution_passes(self._config, self._tuner, self._place))
            self.fused = fused_ops(copied)
            self.graph_module = copied
            self.graph_module.training = self._shown.training
            self._code = self._shown._code
            self._segments, before, self._chains = [], self._chains, {}
            for wrapping, _ in before.values():
                self.chained(wrapping)
        return self.graph_module

    def segments(self) -> list[Segment]:
        """The copy cut into segments, which is done when they are first asked for."""
        copied = self.current()
        self._segments = self._segments or cut(copied, self._leaves)
        return self._segments

    def changing_buffers(self) -> list[Tensor]:
        """The buffers that a training step may change, in the same order on every process."""
        tensors: dict[int, Tensor] = {}
        for segment in self.segments():
            for path in segment.stateful.modules:
                tensors |= {id(x): x for x in segment.module.get_submodule(path).buffers()}
            buffers = (segment.module.get_buffer(path) for path in segment.stateful.buffers)
            tensors |= {id(x): x for x in buffers}
        return list(tensors.values())

    def chained(self, wrapping: Wrapping) -> RecordedModule:
        """The copy as a chain of segments.

        Segments that run only once are not checkpointed, and neither is the last: backward begins with it, so that it
        would give back no memory.
        """
        compiling = torch.compiler.is_compiling()
        segments = [] if compiling else self.segments()
        held = self._chains.get(wrapping.checkpoint is None)
        if not compiling and (held is None or held[0] != wrapping):
            shared = SharedCode()

            def wrap(segment: Segment) -> nn.Module:
                mine = wrapping if segment is not segments[-1] else wrapping._replace(checkpoint=None)
                return _wrapped(segment, mine, shared)

            held = wrapping, chain(self.graph_module, segments, wrap)
            self._chains[wrapping.checkpoint is None] = held
        assert held is not None
        return held[1]

    def backends(self) -> dict[str, OpBackend]:
        """What computes each quantized op, by name: see :meth:`fractrain_fx.FracModel.backends`."""
        shown, config = self._shown, self._config
        names = [op.name for _, op in ops_of(shown.graph) if op.precision.rounds]
        apart = unfused(shown)
        never = {"codes": not_on_int8(shown, config), "torchao": not_on_torchao(shown, config)}
        backends: dict[str, OpBackend] = {}
        for name in names:
            refused = {backend: reasons[name] for backend, reasons in never.items() if name in reasons}
            op = self.fused.get(name)
            if op is None:
                backends[name] = OpBackend("quantizers", refused | {"fused": apart.get(name, "is not fused")})
            elif TORCHAO in op.backends:
                backends[name] = self._by_torchao(op, refused)
            else:
                backends[name] = self._in_eager_mode(op, refused | op.refused)
        return backends

    def _in_eager_mode(self, op: FusedOp, refused: dict[str, str]) -> OpBackend:
        """The backend that computed an op; ``cpu`` if it was ``plain`` by a format whose functions are C++ kernels."""
        weight = next(self._shown.parameters())
        if op.used != "plain" or not weight.is_cpu or not op.plan.has_kernels("cpu"):
            return OpBackend(op.used, refused)
        if weight.dtype == torch.float64:
            return OpBackend("plain", refused | {"cpu": "computes in torch.float64"})
        return OpBackend("cpu", {name: reason for name, reason in refused.items() if name != "cuda"})

    def _by_torchao(self, op: FusedOp, refused: dict[str, str]) -> OpBackend:
        """As the host knows it without a run, so that it holds for compiled graphs too."""
        weight = next(self._shown.parameters())
        assert op.precision is not None
        kernels: dict[str, str] = {}
        lacks: dict[str, str] = {}
        for product in PRODUCTS:
            kernel = kernel_of(op.plan.fmt.recipe, product, op.precision, weight.device, weight.dtype)
            kernels[product] = f"simulated: {kernel}" if isinstance(kernel, str) else str(kernel)
            lacks |= {product: kernel} if isinstance(kernel, str) else {}
        if len(lacks) == len(PRODUCTS):
            return OpBackend("plain", refused | {"torchao": lacks["forward"]}, kernels)
        return OpBackend("torchao", refused, kernels)

    def kernels(self) -> dict[str, str]:
        """How each quantized op multiplies, by name: see :meth:`fractrain_fx.FracModel.kernels`."""
        shown, config = self._shown, self._config
        names = [op.name for _, op in ops_of(shown.graph) if op.precision.rounds]
        if config.run.torchao:
            apart = not_on_torchao(shown, config)
            words = {
                name: _told(self._by_torchao(op, {}).products) for name, op in self.fused.items() if name not in apart
            }
            return {name: apart.get(name) or words.get(name, "torchao, once the model is rewritten") for name in names}
        left_out = not_on_int8(shown, config)
        ran = {name: op.codes.kernel for name, op in self.fused.items() if op.codes is not None}
        return {name: left_out.get(name) or ran.get(name) or "float" for name in names}


def _told(products: Mapping[str, str]) -> str:
    """How an op multiplies, in one line: once if all three products are computed alike."""
    if len(set(products.values())) == 1:
        return next(iter(products.values()))
    return "; ".join(f"{product.replace('_', ' ')}: {words}" for product, words in products.items())


def _wrapped(segment: Segment, wrapping: Wrapping, shared: SharedCode) -> nn.Module:
    options, groups_of, compiler = wrapping
    part: Any = segment.module if compiler is None else torch.compile(shared.of(segment), **compiler)
    if options is not None and segment.once is None:
        part = Recomputed(part, segment.module, segment.stateful.modules, segment.stateful.buffers, options)
    groups = () if groups_of is None else groups_of(segment)
    return Gathered(groups, part) if groups else part
