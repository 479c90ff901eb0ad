"""The cost of training on the last forward's batch, from the choices made (paper 4.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fractrain_fx.config.precision import FLOAT_BITS, Precision
from fractrain_fx.errors import InputError
from fractrain_fx.nn.full_precision import FullPrecision

__all__ = ["Cost", "CostMeter", "CostRow", "Forward", "OpCost", "gated_meter"]

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
        macs: full-precision MACs of training on a sample, over every counted contraction, at the sizes of this batch.
        steered_macs: those of the ops of ``cp``.
    """

    cp: Float[Tensor, ""]
    cp_total: Float[Tensor, ""]
    fw: Float[Tensor, ""]
    eb: Float[Tensor, ""]
    gc: Float[Tensor, ""]
    choice: dict[str, Float[Tensor, "batch options"]]
    macs: Float[Tensor, ""]
    steered_macs: Float[Tensor, ""]


class Forward(NamedTuple):
    """A forward of a model, with the cost of its batch.

    ``samples`` is ``None`` if no input has samples, ``tokens`` if the inputs are not tokens. ``training``: it was in
    training mode.
    """

    cost: Cost
    samples: int | None
    tokens: int | None
    training: bool

    @property
    def batch(self) -> int:
        """Number of samples; refused if no input has samples."""
        if self.samples is None:
            raise InputError("no input of the last call has samples, so there is no batch: pass tensors with samples")
        return self.samples


class OpCost(NamedTuple):
    """The MACs of an op's three products (FW, EB, GC) for one sample.

    ``weight``: its second operand is a weight. ``least`` has the fewest bits of the operands of each product;
    ``by_product``: both operands of a product have its bits.
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


class CostRow(NamedTuple):
    """Ops whose operands have the same bits, which a graph reads from the same buffers.

    ``macs`` are full-precision MACs of FW, EB and GC over the ops. ``bits`` has the places of their forward bits, of
    the bits of the weight (or of the second activation) and of their backward bits among the bits that the meter is
    called with. ``least`` and ``by_product`` are as in :class:`OpCost`. ``steered``: the ops count for ``Cost.cp``
    beside the gated ones.
    """

    macs: tuple[float, float, float]
    bits: tuple[int, int, int]
    least: tuple[int, int, int] = (0, 0, 0)
    by_product: bool = False
    steered: bool = True


class CostMeter(FullPrecision):
    """Computes the cost of a step from its choices and from the bits that its other ops have now.

    All tables are buffers, so neither a stage nor a target is part of the graph's structure. Checkpoints leave them
    out, because they follow from the graph.

    ``gated`` has, for each gated block, MACs spent on FW, EB and GC by option: ``[options][3]``. ``full`` and ``total``
    are full-precision MACs of FW, EB and GC, over the gated and scheduled ops and over all counted ops. ``fixed`` are
    those that float ops spend, ``rows`` the scheduled and pinned ops.
    """

    def __init__(
        self,
        gated: Mapping[str, Sequence[Sequence[float]]],
        full: Sequence[float],
        fixed: Sequence[float],
        total: Sequence[float],
        rows: Sequence[CostRow] = (),
    ) -> None:
        super().__init__()
        self.blocks = tuple(gated)
        self._computed: tuple[list[tuple[int, int]], Cost] | None = None
        # Without gated and scheduled ops, cp and its parts are over all counted ones.
        steers = any(full)
        over = full if steers else total
        for name, values in (
            ("table", [[list(option) for option in block] for block in gated.values()]),
            ("full", full),
            ("macs", [row.macs for row in rows]),
            ("least", [row.least for row in rows]),
            # The first of two counts for cp and its parts, the second for cp_total.
            ("counts", [[[float(row.steered or not steers)] for row in rows], [[1.0]] * len(rows)]),
            ("fixed", [[0.0] * 3 if steers else fixed, fixed]),
            ("over", [sum(over), sum(total)]),
            ("inverse", [1 / macs if macs else 0.0 for macs in over]),
        ):
            table = torch.tensor(values, dtype=torch.float64).to(torch.float32)
            self.register_buffer(name, table, persistent=False)
        by_product = torch.tensor([[row.by_product] for row in rows], dtype=torch.bool)
        self.register_buffer("by_product", by_product, persistent=False)
        self.register_buffer("places", torch.tensor([row.bits for row in rows], dtype=torch.int64), persistent=False)

    table: Tensor
    full: Tensor
    macs: Tensor
    least: Tensor
    counts: Tensor
    fixed: Tensor
    over: Tensor
    inverse: Tensor
    by_product: Tensor
    places: Tensor

    @torch.no_grad()
    def follow(self, other: CostMeter) -> None:
        """Take the numbers of another meter of the same ops, in place: a compiled graph sees them too."""
        for name, value in other.named_buffers():
            self.get_buffer(name).copy_(value)

    def take(self, other: CostMeter) -> None:
        """Compute with the buffers of another meter of the same ops. Backward passes still to come keep theirs."""
        self._buffers.update(other._buffers)

    def of_samples(self, choices: Sequence[Float[Tensor, "batch options"]]) -> Float[Tensor, " batch"]:
        """The share (0..1) that each sample's choices (one tensor for each gated block) add to ``Cost.cp``."""
        prices = self.table.sum(dim=-1)  # of each option of each block
        spent = torch.stack([choice.float() @ price for choice, price in zip(choices, prices, strict=True)])
        return spent.sum(dim=0) / self.full.sum()

    def forward(
        self, choices: Sequence[Tensor], bits: Sequence[Tensor] = (), shares: Sequence[Tensor | None] = ()
    ) -> Cost:
        """Cost of the choices, a tensor for each gated block, and of the present bits.

        Without choices it is computed again only if bits, shares or tables have changed. ``bits`` has each tensor of
        bits once; ``shares`` has, for each row, the share of its backward bits that the samples need
        (:class:`~fractrain_fx.nn.needed_bits.MeasuringGradientQuantizer`), ``None`` in rows that need all of them.
        Without any, all rows do.
        """
        if choices or torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return self._compute(choices, bits, shares)
        read = (*self._buffers.values(), *bits, *shares)
        versions = [(id(x), x._version) for x in read if x is not None]
        if self._computed is None or self._computed[0] != versions:
            with torch.no_grad():
                self._computed = versions, self._compute(choices, bits, shares)
        cost = self._computed[1]
        return cost._replace(cp=cost.cp.detach())  # a tensor of its own, by which calls are told apart

    def _compute(self, choices: Sequence[Tensor], bits: Sequence[Tensor], shares: Sequence[Tensor | None]) -> Cost:
        spent = self.fixed  # MACs of FW, EB and GC, for cp and for cp_total
        if choices:
            frequency = torch.stack(tuple(choices)).float().mean(dim=1)
            spent = spent + (frequency.unsqueeze(-1) * self.table).sum(dim=(0, 1))
        if bits:
            spent = spent + (self.counts * self._spent(bits, shares)).sum(dim=1)
        cp, everything = (spent.sum(dim=1) / self.over).unbind()
        fw, eb, gc = (spent[0] * self.inverse).unbind()
        steered, every = self.over.unbind()
        return Cost(cp, everything, fw, eb, gc, dict(zip(self.blocks, choices, strict=True)), every, steered)

    def _spent(self, bits: Sequence[Tensor], shares: Sequence[Tensor | None]) -> Float[Tensor, "rows 3"]:
        """MACs of FW, EB and GC of each row, times their shares as :meth:`Precision.shares` has them."""
        b, w, g = torch.stack(tuple(bits)).float()[self.places].unbind(dim=1)
        widths = torch.stack((b, g, g), dim=1)  # the bits of each product
        first = torch.where(self.by_product, widths, torch.stack((b, g, b), dim=1))
        second = torch.where(self.by_product, widths, torch.stack((w, w, g), dim=1))
        spent = self.macs * (first.maximum(self.least) * second.maximum(self.least) / _FULL)
        if not shares:
            return spent
        whole = torch.ones_like(self.over[0])
        needed = torch.stack([whole if share is None else share for share in shares])
        return spent * torch.stack((torch.ones_like(needed), needed, needed), dim=1)


def gated_meter(model: nn.Module) -> CostMeter | None:
    """The meter of a rewritten model; ``None`` if the model has no gates."""
    meters = (module for module in model.modules() if isinstance(module, CostMeter) and module.blocks)
    return next(meters, None)
