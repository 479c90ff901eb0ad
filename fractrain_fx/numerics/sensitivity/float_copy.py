"""A copy of a model that rounds nothing, whose quantized ops can be watched and changed one by one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.fx import Node

from fractrain_fx.capture import WRITTEN, Recording
from fractrain_fx.capture.asked import RequiresGrad
from fractrain_fx.capture.inputs.wrappers import unwrapped
from fractrain_fx.config import FracConfig, Pin, RunConfig
from fractrain_fx.config.precision import FULL
from fractrain_fx.config.recipes import named
from fractrain_fx.errors import ConfigError, InputError, ModelError
from fractrain_fx.execution.arithmetic import Bound, Gradients, Needs
from fractrain_fx.execution.fused_op import FusedOp
from fractrain_fx.execution.plan import NOTHING_KEPT, Call, Computed, Kept, Plan, contract
from fractrain_fx.model import FracModel
from fractrain_fx.nn.cost import OpCost
from fractrain_fx.numerics.criterion import Criterion, arguments_of, inputs_and_targets
from fractrain_fx.passes import Decision, Op, costed, facts
from fractrain_fx.rewriting import record_model, rewrite

__all__ = ["FloatCopy", "Probe", "fixed_by_rule"]

_BFLOAT16 = Pin("*", format="bfloat16")
_IGNORED = -100  # the target that torch's cross-entropy leaves out


class Probe:
    """Computes an op in float, and lets a measurement see and change what it multiplies.

    ``on_forward`` gets the op and its call, and returns the two factors to multiply. ``on_backward`` gets the op, its
    call and the output's gradient. It returns the gradient that is multiplied by the second factor (for the first one's
    gradient), and the one that is multiplied by the first factor. ``known`` is an output that is not computed again.
    """

    name = "probe"
    known: Tensor | None = None
    on_forward: Callable[[Plan, Call], tuple[Tensor, Tensor]] | None = None
    on_output: Callable[[Tensor], None] | None = None
    on_backward: Callable[[Plan, Call, Tensor], tuple[Tensor, Tensor]] | None = None

    def release(self) -> None:
        """See and change nothing any more."""
        self.on_forward = self.on_output = self.on_backward = self.known = None

    def refuses(self, plan: Plan, call: Call, needs: Needs) -> str | None:
        return None

    def forward(self, plan: Plan, call: Call) -> Computed:
        if self.known is not None:
            return self.known.clone(), NOTHING_KEPT  # the next node may write to it
        first, second = (call.a, call.b) if self.on_forward is None else self.on_forward(plan, call)
        out = contract(plan, call, first, second)
        if self.on_output is not None:
            self.on_output(out)
        return out, NOTHING_KEPT

    def backward(self, plan: Plan, call: Call, g: Tensor, kept: tuple[Kept, Kept], needs: Needs) -> Gradients:
        by_second, by_first = (g, g) if self.on_backward is None else self.on_backward(plan, call, g)
        bound = Bound(call.a.to(g.dtype), call.b.to(g.dtype), call.added, plan.static)
        of_a, _, _ = plan.arithmetic.backward(by_second, bound, (needs[0], False, False))
        _, of_b, of_added = plan.arithmetic.backward(by_first, bound, (False, *needs[1:]))
        return of_a, of_b, of_added


class FloatCopy:
    """A float copy of a model, rewritten or not, in training mode, recorded on ``batch``.

    Frozen parameters get gradients too, because rounding a frozen layer changes the loss. Without ``criterion``, the
    loss of a batch ``(inputs, targets)``, the model computes its loss. ``config`` has number format and rules, if the
    model was not rewritten.

    ``probes`` compute each quantized op, by the op's name, but for those that a rule keeps in float or bfloat16.
    ``costs`` has every counted op with the cost of its products, ``weights`` the name of the trained weight of each
    quantized op that has one. ``last_loss`` is the loss of the batch whose gradients were computed last.
    """

    def __init__(self, model: nn.Module, batch: Any, criterion: Criterion | None, config: FracConfig | None) -> None:
        original: nn.Module = unwrapped(model)
        if isinstance(original, FracModel):
            if config is not None:
                raise ConfigError("config= is for a model that was not rewritten; this one has its own: leave it out")
            if original._state.sharding is not None:
                raise ModelError(
                    "a sharded model cannot be copied: load its weights into one process, and measure there"
                )
            config, original = original.frac_config, original._state.original
        self.config = _rounding_all(config or FracConfig())
        self._criterion = criterion
        self.original = copy.deepcopy(original)
        if not self.original.training:  # parts that a model keeps in eval mode while it trains stay so
            self.original.train()
        recording = record_model(self.original, self.config, *self._arguments(batch))
        self.model = FracModel(rewrite(self.original, recording, self.config))
        self.costs: list[tuple[Op, OpCost]] = costed(recording.train, self.config)
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.probes: dict[str, Probe] = {}
        self.weights: dict[str, str] = {}
        self.last_loss = 0.0
        for node in self.model._state.running[True].graph_module.graph.find_nodes(op="call_module"):
            fused, op = self.model.get_submodule(str(node.target)), facts(node).op
            if isinstance(fused, FusedOp) and op is not None:
                fused.backends = (probe := Probe(),)
                if fixed_by_rule(op.precision) is not None:
                    continue
                self.probes[op.name] = probe
                place = "a" if fused.plan.first.weight else "b" if fused.plan.second.weight else None
                if place is not None and (name := _read_by(node.kwargs[place])) in self.parameters:
                    self.weights[op.name] = name
        _reach_frozen(self.original, recording)

    @property
    def samples(self) -> int:
        """The samples of the last batch."""
        return self.model.batch

    def loss(self, batch: Any) -> Tensor:
        """The loss of a batch. Every call draws the same random numbers."""
        args, kwargs = self._arguments(batch)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            output = self.model(*args, **kwargs)
        if self._criterion is not None:
            loss: Any = self._criterion(output, batch[1])
        else:
            loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise InputError(
                "the model returned no loss of one number: give batches with labels, or batches (inputs, targets) and "
                "criterion=F.cross_entropy"
            )
        return loss.reshape(()) if loss.ndim else loss

    def terms(self, batch: Any) -> int:
        """The number of terms of which the loss of a batch is the mean: its whole-numbered targets, or its samples."""
        targets = batch.get("labels") if isinstance(batch, Mapping) else batch[1] if self._criterion else None
        if isinstance(targets, Tensor) and not targets.is_floating_point():
            return max(1, int((targets != _IGNORED).sum()))
        return self.samples

    def release(self) -> None:
        """Watch and change nothing any more."""
        for probe in self.probes.values():
            probe.release()

    def gradients(self, batch: Any) -> dict[str, Tensor]:
        """The gradient of each weight of a quantized op."""
        self.model.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        self.last_loss = float(loss.detach())
        gradients = {name: self.parameters[name].grad for name in sorted(set(self.weights.values()))}
        self.model.zero_grad()
        return {name: gradient for name, gradient in gradients.items() if gradient is not None}

    @contextmanager
    def moved(self, step: Mapping[str, Tensor], scale: float) -> Iterator[None]:
        """Meanwhile the weights are moved by ``scale`` times ``step``."""
        before = {name: self.parameters[name].detach().clone() for name in step}
        with torch.no_grad():
            for name, change in step.items():
                self.parameters[name].add_(change, alpha=scale)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, old in before.items():
                    self.parameters[name].copy_(old)

    def _arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return arguments_of(batch) if self._criterion is None else inputs_and_targets(batch)[0]


def fixed_by_rule(decision: Decision) -> Literal["float", "bfloat16"] | None:
    """The type in which a rule keeps an op, which is then not measured."""
    if decision.precision == FULL:
        return "float"
    rounding = decision.format, decision.recipe, decision.precision
    return "bfloat16" if rounding == (_BFLOAT16.number_format, _BFLOAT16.product_recipe, _BFLOAT16.precision) else None


def _reach_frozen(model: nn.Module, recording: Recording) -> None:
    """Let a gradient reach frozen parameters, but not those that the model writes to, or asks whether they need one."""
    circumstances = [read.circumstance for read in recording.seen[True] if isinstance(read.circumstance, RequiresGrad)]
    left = recording.train.meta[WRITTEN].union(*(circumstance.names for circumstance in circumstances))
    for name, parameter in model.named_parameters():
        if name not in left and parameter.is_floating_point():
            parameter.requires_grad_(True)


def _read_by(node: Any) -> str:
    """The name of the parameter that a weight is, or is made from; empty if there is none."""
    while isinstance(node, Node) and node.op != "get_attr":
        node = next(iter(node.all_input_nodes), None)
    return str(node.target) if isinstance(node, Node) else ""


def _rounding_all(config: FracConfig) -> FracConfig:
    """Static training in the formats of a configuration: every op that any method rounds is quantized."""
    recipe = config.product_recipe
    return FracConfig(
        method="static",
        precision=FULL,
        format=config.format,
        recipe=None if recipe is None else named(recipe),
        attention=config.attention,
        pins=tuple(map(_unstaged, config.pins)),
        affine=config.affine,
        run=RunConfig(backend="plain", memory_format="preserve", batch_axis=config.run.batch_axis, compared_calls=0),
    )


def _unstaged(pin: Pin) -> Pin:
    """A rule at its fewest bits, with the recipe that the bits of all its stages stand for."""
    fewest = min(pin.stages, key=lambda stage: (stage.fw, stage.bw))
    recipe = None if pin.format == "bfloat16" else pin.product_recipe
    return replace(pin, precision=fewest, recipe=None if recipe is None else named(recipe))
