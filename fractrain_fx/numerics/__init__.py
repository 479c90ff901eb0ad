"""How low precision changes the numbers of a model: which op it hurts, and where bits are worth their cost."""

from fractrain_fx.numerics.comparison import Comparison, OpDifference, compare
from fractrain_fx.numerics.examine import examine
from fractrain_fx.numerics.findings import Finding
from fractrain_fx.numerics.records import OperandRecord, WatchedStep, read_steps
from fractrain_fx.numerics.statistics import Statistics
from fractrain_fx.numerics.watching import Watch, watch

__all__ = [
    "Comparison",
    "Finding",
    "OpDifference",
    "OperandRecord",
    "Statistics",
    "Watch",
    "WatchedStep",
    "compare",
    "examine",
    "read_steps",
    "watch",
]
