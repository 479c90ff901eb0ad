"""The rewritten graph behind the original model's face, and what makes it run."""

from fractrain_fx.model.face import FracModel

__all__ = ["FracModel"]
