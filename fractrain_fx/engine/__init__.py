"""PFQ, DFQ and FracTrain at run time: indicator, schedules, cost controller, ledger and the engine that joins them."""

from fractrain_fx.engine.controller import CostController
from fractrain_fx.engine.dependence import InputDependence
from fractrain_fx.engine.engine import Engine, StageChange
from fractrain_fx.engine.indicator import PlateauIndicator
from fractrain_fx.engine.ledger import Ledger
from fractrain_fx.engine.rows import EpochRow
from fractrain_fx.engine.schedules import StageSchedule, plan_stages

__all__ = [
    "CostController",
    "Engine",
    "EpochRow",
    "InputDependence",
    "Ledger",
    "PlateauIndicator",
    "StageChange",
    "StageSchedule",
    "plan_stages",
]
