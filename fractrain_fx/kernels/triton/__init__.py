"""Triton kernels for a GPU, one launch each: affine rounding, ranges and gates' gradient; rounding in blocks."""

from fractrain_fx.kernels.triton.block_calls import round_blocks_by_triton
from fractrain_fx.kernels.triton.calls import gains_by_triton, measure_by_triton, round_by_triton, round_rows_by_triton
from fractrain_fx.kernels.triton.fit import has_triton

__all__ = [
    "gains_by_triton",
    "has_triton",
    "measure_by_triton",
    "round_blocks_by_triton",
    "round_by_triton",
    "round_rows_by_triton",
]
