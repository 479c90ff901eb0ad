"""Widths of each op under a budget."""

from fractrain_fx.numerics.allocation.allocate import Allocation, allocate

__all__ = ["Allocation", "allocate"]
