"""What a rewritten model takes from the original and cannot follow when it changes: structure, attributes, hooks."""

from fractrain_fx.tied.float_calls import FloatCalls, forget_notices
from fractrain_fx.tied.tied import Tied

__all__ = ["FloatCalls", "Tied", "forget_notices"]
