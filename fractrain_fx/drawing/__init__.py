"""A rewritten model as a picture."""

from fractrain_fx.drawing.drawing import draw

__all__ = ["draw"]
