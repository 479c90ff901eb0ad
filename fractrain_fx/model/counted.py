"""The part of a FracModel's face that says what it consists of and what it costs."""

from __future__ import annotations

from fractrain_fx.errors import InputError
from fractrain_fx.model.state import Inside
from fractrain_fx.nn.cost import Cost
from fractrain_fx.passes import Block, Op, blocks_of, ops_of
from fractrain_fx.passes.analyse.trained import trained_share

__all__ = ["Counted"]


class Counted:
    """Ops, blocks and costs, always of the parameters that are trained now."""

    @property
    def _inside(self) -> Inside:
        raise NotImplementedError

    @property
    def ops(self) -> list[Op]:
        """Every contraction of the model in order, with its MACs and the reason for its precision."""
        self._inside.follow_frozen()
        return [op for _, op in ops_of(self._inside.recording.train.graph)]

    @property
    def blocks(self) -> list[Block]:
        """Every block, in order of its entry."""
        return blocks_of(self._inside.recording.train.graph)

    @property
    def macs(self) -> int:
        """Forward MACs of one sample over all counted contractions."""
        return sum(op.macs or 0 for op in self.ops)

    @property
    def uncounted(self) -> int:
        """Contractions that no formula counts: their cost is in no share."""
        return sum(op.macs is None for op in self.ops)

    @property
    def trained_share(self) -> float:
        """Full-precision cost of a step as a share 0..1 of that with every parameter trained: less with frozen ones."""
        self._inside.follow_frozen()
        return trained_share(self._inside.recording.train)

    @property
    def cost(self) -> Cost:
        """Cost of the last forward, as shares (0..1) of full-precision training."""
        self._inside.follow_frozen()  # a compiled forward does not look
        if self._inside.cost is None:
            raise InputError("no forward has run yet, so there is no cost to read: call the model on a batch first")
        return self._inside.cost

    @property
    def batch(self) -> int:
        """Number of samples of the last forward."""
        if self._inside.batch is None:
            raise InputError("no forward has run yet, so there is no batch: call the model on a batch first")
        return self._inside.batch

    @property
    def targets(self) -> tuple[float, ...]:
        """Target cp of each stage in per cent (gated methods only; empty otherwise)."""
        return self._inside.targets

    @property
    def reachable(self) -> tuple[float, float] | None:
        """Lowest and highest cp in per cent that the gates can choose; ``None`` without gates."""
        self._inside.follow_frozen()
        return self._inside.reachable
