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

__all__ = ["Cost", "CostMeter", "OpCost", "gated_meter"]

_FULL = FLOAT_BITS * FLOAT_BITS


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
    ) -> None:
        super().__init__()
        self._staged = {stage: tuple(map(float, spent)) for stage, spent in (staged or {}).items()}
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
        ):
            table = torch.tensor(values, dtype=torch.float64).to(torch.float32)
            # Checkpoints of older versions lack some.
            lacking = name in ("weighted", "by_product") or (name == "own" and not self._staged)
            self.register_buffer(name, table, persistent=not lacking)

    table: Tensor
    full: Tensor
    scheduled: Tensor
    fixed: Tensor
    total: Tensor
    weighted: Tensor
    by_product: Tensor
    own: Tensor

    @torch.no_grad()
    def set(self, stage: Precision) -> None:
        """Take what ops with bits of their own spend in a stage."""
        if self._staged:
            self.own.copy_(torch.tensor(self._staged[stage]))

    @torch.no_grad()
    def follow(self, other: CostMeter) -> None:
        """Take the numbers of another meter of the same blocks, in place: a compiled graph sees them too."""
        self._staged = other._staged
        for name, value in other.named_buffers():
            self.get_buffer(name).copy_(value)

    def of_samples(self, choices: Sequence[Float[Tensor, "batch options"]]) -> Float[Tensor, " batch"]:
        """The share (0..1) that each sample's choices (one tensor for each gated block) add to ``Cost.cp``."""
        prices = self.table.sum(dim=-1)  # of each option of each block
        spent = torch.stack([choice.float() @ price for choice, price in zip(choices, prices, strict=True)])
        return spent.sum(dim=0) / self.full.sum()

    def forward(self, choices: Sequence[Tensor], bits: tuple[Tensor, Tensor] | None) -> Cost:
        """Cost of the choices (one tensor for each gated block) and of the stage's (forward, backward) bits.

        Without choices it is computed again only if the stage's bits or the tables have changed.
        """
        if choices or torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return self._compute(choices, bits)
        read = (*self._buffers.values(), *(bits or ()))
        versions = [(id(x), x._version) for x in read if x is not None]
        if self._computed is None or self._computed[0] != versions:
            with torch.no_grad():
                self._computed = versions, self._compute(choices, bits)
        cost = self._computed[1]
        return cost._replace(cp=cost.cp.detach())  # a tensor of its own, by which calls are told apart

    def _compute(self, choices: Sequence[Tensor], bits: tuple[Tensor, Tensor] | None) -> Cost:
        spent = torch.zeros_like(self.full)
        if choices:
            frequency = torch.stack(tuple(choices)).float().mean(dim=1)
            spent = spent + (frequency.unsqueeze(-1) * self.table).sum(dim=(0, 1))
        if bits is not None:
            b, g = (each.to(torch.float32) for each in bits)
            w = torch.full_like(b, self.weight_bits)
            spent = spent + self.scheduled * self._shares((b, b), (g, b), (b, g))
            spent = spent + self.weighted * self._shares((b, w), (g, w), (b, g))
            if self._has_by_product:
                spent = spent + self.by_product * self._shares((b, b), (g, g), (g, g))
        if self._staged:
            spent = spent + self.own
        measured = self.full.sum() > 0
        everything = (spent + self.fixed).sum() / self.total.sum()
        # Without gated and scheduled ops, cp and its parts are over all counted ones.
        over = torch.where(measured, self.full, self.total)
        part = torch.where(measured, spent, spent + self.fixed)
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
