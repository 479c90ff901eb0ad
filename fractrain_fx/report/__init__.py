"""What a model became and what its runs did, to look at."""

from fractrain_fx.report.drawing import draw

__all__ = ["draw"]
