"""What runs did, side by side, to look at."""

from fractrain_fx.drawing import draw

__all__ = ["draw"]
