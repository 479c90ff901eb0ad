"""The cost of training on the last forward's batch, from the choices made (paper 4.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fractrain_fx.config.precision import FLOAT_BITS, Precision
from fractrain_fx.nn.bits import FollowsStage
from fractrain_fx.nn.full_precision import FullPrecision

__all__ = ["Backward", "Cost", "CostMeter", "OpCost", "gated_meter"]

_FULL = FLOAT_BITS * FLOAT_BITS
_NOTHING = (0.0, 0.0, 0.0)


class Cost(NamedTuple):
    """Shares (0..1) of the full-precision cost of training on a batch, averaged over its samples.

    Attributes:
        cp: over the gated and scheduled ops, or over every counted one if none is; differentiable in the choices. The
            controller steers it.
        cp_total: over every counted contraction.
        fw, eb, gc: the cost of the forward pass, of error back-propagation and of gradient computation, each as a share
            of its own cost at full precision, over the ops of ``cp``.
        choice: for each gated block, the one-hot choice of every sample.
    """

    cp: Float[Tensor, ""]
    cp_total: Float[Tensor, ""]
    fw: Float[Tensor, ""]
    eb: Float[Tensor, ""]
    gc: Float[Tensor, ""]
    choice: dict[str, Float[Tensor, "batch options"]]


class OpCost(NamedTuple):
    """The MACs of an op's three products for one sample.

    Attributes:
        macs: of FW, EB and GC.
        weight: whether its second operand is a weight.
        least: fewest bits of the operands of each product.
        by_product: whether both operands of a product have its bits.
    """

    macs: tuple[int, int, int]
    weight: bool = True
    least: tuple[int, int, int] = (0, 0, 0)
    by_product: bool = False

    def spent(self, precision: Precision, weight_bits: int | None = None) -> tuple[float, float, float]:
        """MACs of FW, EB and GC, each times its share of a 32 x 32 bit product.

        ``weight_bits`` defaults to the forward bits; products of two activations have no weight and always use those.
        """
        weight_bits = precision.fw if weight_bits is None or not self.weight else weight_bits
        shares = precision.shares(weight_bits, self.least, by_product=self.by_product)
        fw, eb, gc = self.macs
        return fw * shares[0], eb * shares[1], gc * shares[2]


class Backward(NamedTuple):
    """The MACs of EB and GC of one op (FW is 0), in the group that it belongs to; the other two are 0.

    Attributes:
        scheduled: at full precision, of an op at the bits of the stage.
        staged: at its own bits in each stage.
        fixed: at the bits of its rule.
    """

    scheduled: Sequence[float] = _NOTHING
    staged: Mapping[Precision, Sequence[float]] | None = None
    fixed: Sequence[float] = _NOTHING


class CostMeter(FullPrecision, FollowsStage):
    """Computes the cost of a step from its choices and the stage's bits.

    All tables are buffers, so neither a stage nor a target is part of the graph's structure.

    Args:
        gated: for each gated block, MACs spent on FW, EB and GC by option: ``[options][3]``.
        full: full-precision MACs of FW, EB and GC over the gated and scheduled ops.
        scheduled: MACs of FW, EB and GC over the scheduled ops whose second operand has the stage's forward bits.
        fixed: MACs that float and pinned ops spend at their own bits.
        total: full-precision MACs over all counted ops.
        weighted: MACs of FW, EB and GC over the scheduled ops whose weights have ``weight_bits``.
        weight_bits: bits of the weights of ``weighted``.
        least: fewest bits of the operands of FW, EB and GC in scheduled ops.
        by_product: MACs of FW, EB and GC over the scheduled ops both of whose operands have their product's bits.
        staged: MACs that scheduled ops with bits of their own spend on FW, EB and GC in each stage.
        backward: for each op whose samples' gradients take the bits that they need
            (:class:`~fractrain_fx.nn.needed_bits.MeasuringGradientQuantizer`), its part of ``scheduled``, of ``staged``
            and of ``fixed``, without FW.
    """

    def __init__(
        self,
        gated: Mapping[str, Sequence[Sequence[float]]],
        full: Sequence[float],
        scheduled: Sequence[float],
        fixed: Sequence[float],
        total: Sequence[float],
        weighted: Sequence[float] = (0.0, 0.0, 0.0),
        weight_bits: int = FLOAT_BITS,
        least: tuple[int, int, int] = (0, 0, 0),
        by_product: Sequence[float] = (0.0, 0.0, 0.0),
        staged: Mapping[Precision, Sequence[float]] | None = None,
        backward: Sequence[Backward] = (),
    ) -> None:
        super().__init__()
        self._staged = {stage: tuple(map(float, spent)) for stage, spent in (staged or {}).items()}
        self._backward = tuple(backward)
        self.blocks = tuple(gated)
        self.weight_bits = weight_bits
        self.least = least
        self._has_by_product = any(by_product)
        self._computed: tuple[list[tuple[int, int]], Cost] | None = None
        for name, values in (
            ("table", [[list(option) for option in block] for block in gated.values()]),
            ("full", full),
            ("scheduled", scheduled),
            ("fixed", fixed),
            ("total", total),
            ("weighted", weighted),
            ("by_product", by_product),
            ("own", next(iter(self._staged.values()), (0.0, 0.0, 0.0))),
            ("needed", self._backward_at(next(iter(self._staged), None))),
        ):
            table = torch.tensor(values, dtype=torch.float64).to(torch.float32)
            # Checkpoints of older versions lack some.
            lacking = name in ("weighted", "by_product", "needed") or (name == "own" and not self._staged)
            self.register_buffer(name, table, persistent=not lacking)

    table: Tensor
    full: Tensor
    scheduled: Tensor
    fixed: Tensor
    total: Tensor
    weighted: Tensor
    by_product: Tensor
    own: Tensor
    needed: Tensor

    @torch.no_grad()
    def set(self, stage: Precision) -> None:
        """Take what ops with bits of their own spend in a stage."""
        if self._staged:
            self.own.copy_(torch.tensor(self._staged[stage]))
            self.needed.copy_(torch.tensor(self._backward_at(stage)))

    def _backward_at(self, stage: Precision | None) -> list[list[Sequence[float]]]:
        """The parts of ``backward`` in a stage: ``[3][ops][3]``."""
        return [
            [each.scheduled for each in self._backward],
            [_NOTHING if stage is None else (each.staged or {}).get(stage, _NOTHING) for each in self._backward],
            [each.fixed for each in self._backward],
        ]

    @torch.no_grad()
    def follow(self, other: CostMeter) -> None:
        """Take the numbers of another meter of the same blocks, in place: a compiled graph sees them too."""
        self._staged, self._backward = other._staged, other._backward
        for name, value in other.named_buffers():
            self.get_buffer(name).copy_(value)

    def of_samples(self, choices: Sequence[Float[Tensor, "batch options"]]) -> Float[Tensor, " batch"]:
        """The share (0..1) that each sample's choices (one tensor for each gated block) add to ``Cost.cp``."""
        prices = self.table.sum(dim=-1)  # of each option of each block
        spent = torch.stack([choice.float() @ price for choice, price in zip(choices, prices, strict=True)])
        return spent.sum(dim=0) / self.full.sum()

    def forward(
        self, choices: Sequence[Tensor], bits: tuple[Tensor, Tensor] | None, shares: Sequence[Tensor] = ()
    ) -> Cost:
        """Cost of the choices (one tensor for each gated block) and of the stage's (forward, backward) bits.

        Without choices it is computed again only if the stage's bits, the shares or the tables have changed.

        Args:
            choices: one tensor for each gated block.
            bits: forward and backward bits of the stage.
            shares: for each op of ``backward``, the share of its backward bits that the samples need.
        """
        if choices or torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return self._compute(choices, bits, shares)
        read = (*self._buffers.values(), *(bits or ()), *shares)
        versions = [(id(x), x._version) for x in read if x is not None]
        if self._computed is None or self._computed[0] != versions:
            with torch.no_grad():
                self._computed = versions, self._compute(choices, bits, shares)
        cost = self._computed[1]
        return cost._replace(cp=cost.cp.detach())  # a tensor of its own, by which calls are told apart

    def _compute(self, choices: Sequence[Tensor], bits: tuple[Tensor, Tensor] | None, shares: Sequence[Tensor]) -> Cost:
        spent, scheduled, own, fixed = torch.zeros_like(self.full), self.scheduled, self.own, self.fixed
        if shares:
            unspent = (1 - torch.stack(tuple(shares))) @ self.needed
            scheduled, own, fixed = scheduled - unspent[0], own - unspent[1], fixed - unspent[2]
        if choices:
            frequency = torch.stack(tuple(choices)).float().mean(dim=1)
            spent = spent + (frequency.unsqueeze(-1) * self.table).sum(dim=(0, 1))
        if bits is not None:
            b, g = (each.to(torch.float32) for each in bits)
            w = torch.full_like(b, self.weight_bits)
            spent = spent + scheduled * self._shares((b, b), (g, b), (b, g))
            spent = spent + self.weighted * self._shares((b, w), (g, w), (b, g))
            if self._has_by_product:
                spent = spent + self.by_product * self._shares((b, b), (g, g), (g, g))
        if self._staged:
            spent = spent + own
        measured = self.full.sum() > 0
        everything = (spent + fixed).sum() / self.total.sum()
        # Without gated and scheduled ops, cp and its parts are over all counted ones.
        over = torch.where(measured, self.full, self.total)
        part = torch.where(measured, spent, spent + fixed)
        paths = torch.where(over > 0, part / over.clamp(min=1), torch.zeros_like(part))
        cp = torch.where(measured, spent.sum() / self.full.sum().clamp(min=1), everything)
        return Cost(cp, everything, paths[0], paths[1], paths[2], dict(zip(self.blocks, choices, strict=True)))

    def _shares(self, *operands: tuple[Tensor, Tensor]) -> Tensor:
        """The shares of FW, EB and GC from the bits of their operands, as :meth:`Precision.shares` has them."""
        products = (
            x.clamp(min=fewest) * y.clamp(min=fewest) if fewest else x * y
            for (x, y), fewest in zip(operands, self.least, strict=True)
        )
        return torch.stack(tuple(products)) / _FULL


def gated_meter(model: nn.Module) -> CostMeter | None:
    """The meter of a rewritten model; ``None`` if the model has no gates."""
    meters = (module for module in model.modules() if isinstance(module, CostMeter) and module.blocks)
    return next(meters, None)
