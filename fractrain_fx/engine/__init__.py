"""PFQ, DFQ and FracTrain at run time: indicator, schedules, cost term, ledger and the engine that joins them."""

from fractrain_fx.engine.cost_term import CostTerm
from fractrain_fx.engine.dependence import InputDependence
from fractrain_fx.engine.engine import Engine, StageChange
from fractrain_fx.engine.indicator import PlateauIndicator
from fractrain_fx.engine.ledger import Ledger
from fractrain_fx.engine.rows import EpochRow
from fractrain_fx.engine.schedules import StageSchedule, plan_stages

__all__ = [
    "CostTerm",
    "Engine",
    "EpochRow",
    "InputDependence",
    "Ledger",
    "PlateauIndicator",
    "StageChange",
    "StageSchedule",
    "plan_stages",
]
