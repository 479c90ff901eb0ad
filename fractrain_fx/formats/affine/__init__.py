"""The affine format (SBM, arXiv 1805.11046): its formula, its levels, and the gradient of a gate's choice."""

from fractrain_fx.formats.affine.format import AffineFormat, fake_quantize, measure
from fractrain_fx.formats.affine.ranges import RangedAffineFormat

__all__ = ["AffineFormat", "RangedAffineFormat", "fake_quantize", "measure"]
