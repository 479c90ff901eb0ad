"""Reports of runs side by side, as one HTML page with plots."""

from fractrain_fx.drawing import draw

__all__ = ["draw"]
