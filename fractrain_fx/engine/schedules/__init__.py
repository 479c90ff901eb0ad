"""Schedules move a run from one stage to the next: the protocol, the schedules, and the plan of a run's stages."""

from fractrain_fx.engine.schedules.kinds import EpochSchedule, Level, PlateauSchedule, StageSchedule
from fractrain_fx.engine.schedules.plan import LoopLength, StagePlan, lacks_length, plan_stages, unit_of

__all__ = [
    "EpochSchedule",
    "Level",
    "LoopLength",
    "PlateauSchedule",
    "StagePlan",
    "StageSchedule",
    "lacks_length",
    "plan_stages",
    "unit_of",
]
