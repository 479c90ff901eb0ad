"""The read-only properties of a rewritten model: graphs, configuration, kernels, guards, ops and costs."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.fx import Graph

from fractrain_fx.capture import Guard, InputValues, RecordedModule
from fractrain_fx.config import FracConfig
from fractrain_fx.config.precision import Precision
from fractrain_fx.engine.course import Stage
from fractrain_fx.engine.steered import noted_run
from fractrain_fx.errors import InputError
from fractrain_fx.model.executed import OpBackend
from fractrain_fx.model.state import ModelState
from fractrain_fx.nn.bits import stage_of
from fractrain_fx.nn.cost import Cost, Forward
from fractrain_fx.passes import Block, Op, blocks_of, ops_of
from fractrain_fx.passes.analyse.trained import training_macs
from fractrain_fx.passes.graph.edit import NAMESPACE
from fractrain_fx.rewriting import OWN

__all__ = ["Properties"]

_T = TypeVar("_T")


class Properties(nn.Module):
    """The part of :class:`fractrain_fx.FracModel` that only reads. Costs are those of the parameters trained now."""

    @property
    def _state(self) -> ModelState:
        state: ModelState = self.__dict__[OWN]
        return state

    @property
    def graph_module(self) -> RecordedModule:
        """The rewritten graph of the present mode (one graph serves both modes for most models).

        A copy of it runs, in which each quantized op and its quantize nodes are one op with the same values. A change
        to this graph takes effect once it is recompiled.
        """
        recording = self._state.recording
        return recording.train if self.training else recording.eval

    @property
    def graph(self) -> Graph:
        """The rewritten ``torch.fx.Graph``."""
        return self.graph_module.graph

    @property
    def code(self) -> str:
        """The Python code of the rewritten graph."""
        return self.graph_module.code

    def print_readable(self, **options: Any) -> str:
        """Print the rewritten graph as ``torch.fx.GraphModule.print_readable`` does."""
        return self.graph_module.print_readable(**options)

    @property
    def frac_config(self) -> FracConfig:
        """The configuration this model was rewritten with; ``run.backend`` is what was chosen for ``auto``.

        ``model.config`` is the original's own, if it has one.
        """
        return self._state.config

    def kernels(self) -> dict[str, str]:
        """How each quantized op multiplies, by name: ``int8``, ``float``, ``not yet timed``, or the reason for float.

        With torchao: the number types in which it computes the op, or the reason the op stays simulated.
        """
        return self._state.running[True].kernels()

    def backends(self) -> dict[str, OpBackend]:
        """What computed each quantized op in the last call of the training graph, and why quicker backends did not."""
        return self._state.running[True].backends()

    @property
    def leaves(self) -> Mapping[str, str]:
        """Modules that were recorded as one node, with the reason."""
        return self._state.recording.leaves

    @property
    def guards(self) -> tuple[Guard | InputValues, ...]:
        """Conditions of the recording: sizes (and values of inputs) that the model's code reads, and the lines.

        For a call that does not meet them the model is recorded again, or the call refused (``RunConfig.recordings``).
        """
        conditions = {str(guard): guard for guards in self._state.recording.guards.values() for guard in guards.all}
        return tuple(conditions.values())

    @property
    def checked(self) -> bool:
        """Whether the recording was compared with the model, which needs tensors with data (not meta)."""
        return self._state.recording.checked

    @property
    def ops(self) -> list[Op]:
        """Every contraction of the model in order, with its MACs and its precision.

        ``str(op.precision)`` are its bits in the present stage, ``op.precision.reason`` why it has them.
        """
        stage = stage_of(self)
        ops = [
            replace(op, precision=replace(op.precision, now=_bits_now(op, stage, self.frac_config)))
            for op in self._ops()
        ]
        return _unless_hidden(self, "ops", ops)

    def _ops(self) -> list[Op]:
        """The contractions without the bits of the present stage, for which a device would have to be waited for."""
        self._state.follow_frozen()
        return [op for _, op in ops_of(self._state.recording.train.graph)]

    @property
    def stage(self) -> Stage | None:
        """The present stage: ``print(model.stage)`` gives ``2 of 4, FW-4/BW-6``.

        Without an engine, and after weights of another stage were loaded, it is that of the bits that the model has;
        ``None`` if these are of no stage, or gates choose.
        """
        run, now, stages = noted_run(self), stage_of(self), self.frac_config.precision_stages
        if run is not None and (not self.frac_config.scheduled or now == run.course.level):
            return Stage(run.course.stage + 1, len(run.course.levels), run.course.level)
        if not self.frac_config.scheduled or now not in stages:
            return None
        return Stage(stages.index(now) + 1, len(stages), now)

    @property
    def blocks(self) -> list[Block]:
        """Every block, in order of its entry. ``get_submodule("blocks")`` is the model's own part of that name."""
        return _unless_hidden(self, "blocks", blocks_of(self._state.recording.train.graph))

    @property
    def macs(self) -> int:
        """Forward MACs of one sample over all counted contractions."""
        return sum(op.macs or 0 for op in self._ops())

    @property
    def uncounted(self) -> int:
        """Number of contractions that no formula counts. No share of cost includes them."""
        return sum(op.macs is None for op in self._ops())

    @property
    def trained_share(self) -> float:
        """Full-precision cost of a step as a share 0..1 of its cost with every parameter trained."""
        self._state.follow_frozen()
        now, everything = training_macs(self._state.recording.train)
        return now / everything if everything else 1.0

    @property
    def training_macs(self) -> int:
        """Full-precision MACs (FW, EB, GC) of training on one sample with every parameter trained."""
        return training_macs(self._state.recording.train)[1]

    @property
    def cost(self) -> Cost:
        """Cost of the last forward, as shares (0..1) of full-precision training."""
        return self._required(self._state.last).cost

    @property
    def batch(self) -> int:
        """Number of samples of the last forward."""
        return self._required(self._state.last).batch

    @property
    def gradient_runs(self) -> int:
        """Number of training forwards with gradients so far, without those of compiled code."""
        return self._state.runs

    @property
    def tokens(self) -> int | None:
        """Number of tokens of the last forward, padding included; ``None`` if no input is a matrix of tokens."""
        return None if self._state.last is None else self._state.last.tokens

    @property
    def training_forward(self) -> Forward:
        """The last forward with gradients in training mode; once a loss has counted it, the last forward."""
        return self._required(self._state.to_count)

    def count_forward(self) -> Forward:
        """Give ``Engine.loss`` the forward of its batch, :attr:`training_forward`."""
        self._state.waits = False
        self._state.count_compiled()
        return self.training_forward

    def _required(self, forward: Forward | None) -> Forward:
        self._state.follow_frozen()  # a compiled forward does not check
        if forward is None:
            raise InputError("no forward has run yet, so there is no cost to read: call the model on a batch first")
        return forward

    @property
    def targets(self) -> tuple[float, ...]:
        """Target cp of each stage in per cent (gated methods only; empty otherwise)."""
        return self._state.targets

    @property
    def reachable(self) -> tuple[float, float] | None:
        """Lowest and highest cp in per cent that gates and stages can choose; ``None`` without gates."""
        self._state.follow_frozen()
        return None if self._state.reach is None else self._state.reach.interval

    @property
    def gated_share(self) -> float:
        """The gated ops as a share (0..1) of the cost that cp is over; the others are scheduled."""
        return 1.0 if self._state.reach is None else self._state.reach.gated_share

    def describe_watched(self) -> str | None:
        """In a sentence, the op that was first not finite or furthest out in the last watched step.

        ``None`` if the model is not watched (:func:`fractrain_fx.numerics.watch`).
        """
        watcher = self._state.watcher
        return None if watcher is None else watcher.describe()

    def get_submodule(self, target: str) -> nn.Module:
        """A module of the original, also if its name is one of this class's, such as ``blocks``."""
        first, _, rest = target.partition(".")
        part = self._modules.get(first)
        if part is None:
            return super().get_submodule(target)
        watched: nn.Module = self._state.float_calls.looked_up(first, part)
        return watched.get_submodule(rest)

    def get_parameter(self, target: str) -> nn.Parameter:
        """A parameter of the original, also if its name is one of this class's."""
        parameter = self._parameters.get(target)
        return super().get_parameter(target) if parameter is None else parameter

    def get_buffer(self, target: str) -> Tensor:
        """A buffer of the original, also if its name is one of this class's."""
        buffer = self._buffers.get(target)
        return super().get_buffer(target) if buffer is None else buffer

    def extra_repr(self) -> str:
        """Method, ops, blocks and MACs in one line."""
        return f"method={self.frac_config.method}, ops={len(self.ops)}, blocks={len(self.blocks)}, macs={self.macs:,}"

    def __repr__(self) -> str:
        """The original's modules; those that were inserted are counted by class, in one line."""
        lines = [self.extra_repr()]
        for name, child in self._modules.items():
            lines.append(f"({name}): {_inserted(child) if name == NAMESPACE and child else repr(child)}")
        body = textwrap.indent("\n".join(lines), "  ")
        return f"{type(self).__name__}(\n{body}\n)"


class _Hiding(list[_T]):
    """A list of the rewritten model that has the name of one of the original's parts."""

    def __init__(self, items: list[_T], name: str) -> None:
        super().__init__(items)
        self.__dict__["hidden"] = name

    def __getattr__(self, name: str) -> Any:
        hidden = self.__dict__.get("hidden", "")
        raise AttributeError(
            f"model.{hidden} of a rewritten model is a list, which has no {name!r}: the model's own part of that name "
            f'is model.get_submodule("{hidden}")'
        )


def _unless_hidden(model: nn.Module, name: str, items: list[_T]) -> list[_T]:
    return _Hiding(items, name) if name in model._modules else items


def _bits_now(op: Op, stage: Precision | None, config: FracConfig) -> str:
    """The bits that an op has in the present stage, in words."""
    decision = op.precision
    if decision.mode == "scheduled":  # a model that was only planned has no bits yet
        now = None if stage is None else decision.at(config, stage)
        return "" if now is None else "float" if now.is_float else str(now)
    if decision.mode == "pinned":
        return f"{decision.precision or decision.format} (pinned)"
    if decision.mode == "gated":
        options = op.options(config)
        return f"{options[0]} to {options[-1]} (by gate)"
    return "float, uncounted" if decision.mode == "uncounted" else "float"


def _inserted(root: nn.Module) -> str:
    kinds = (type(module) for module in root.modules() if type(module).__module__.startswith("fractrain_fx."))
    counts = Counter(kind.__name__ for kind in kinds)
    return ", ".join(f"{count} {name}" for name, count in counts.items())
