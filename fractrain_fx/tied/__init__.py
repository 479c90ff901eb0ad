"""Notice changes of the original that its rewritten graph cannot follow: structure, attributes, hooks."""

from fractrain_fx.tied.float_calls import FloatCalls, forget_notices
from fractrain_fx.tied.tied import Tied

__all__ = ["FloatCalls", "Tied", "forget_notices"]
