"""The affine format (SBM, arXiv 1805.11046): its formula, its levels, and its C++ kernels."""

from fractrain_fx.formats.affine.format import AffineFormat, fake_quantize, measure
from fractrain_fx.formats.affine.ranges import RangedAffineFormat

__all__ = ["AffineFormat", "RangedAffineFormat", "fake_quantize", "measure"]
