"""Widths of each op under a budget."""

from fractrain_fx.numerics.allocation.allocate import allocate
from fractrain_fx.numerics.allocation.allocation import Allocation, StagedAllocation

__all__ = ["Allocation", "StagedAllocation", "allocate"]
