"""FracModel, the module that runs a rewritten graph and otherwise behaves like the original model, and its parts."""

from fractrain_fx.model.frac_model import FracModel, rewritten_in

__all__ = ["FracModel", "rewritten_in"]
