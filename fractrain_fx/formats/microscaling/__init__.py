"""Small floating-point numbers in blocks that share a scale: MX, NVFP4 and FP8 (OCP Microscaling 1.0)."""

from fractrain_fx.formats.microscaling.elements import ELEMENTS, Element
from fractrain_fx.formats.microscaling.format import MicroscalingFormat, block_format
from fractrain_fx.formats.microscaling.quantize import Scaling, fake_quantize, round_blocks

__all__ = ["ELEMENTS", "Element", "MicroscalingFormat", "Scaling", "block_format", "fake_quantize", "round_blocks"]
