"""Schedules move a run from one stage to the next: the protocol, the schedules, and the plan of a run's stages."""

from fractrain_fx.engine.schedules.kinds import AutoSchedule, EpochSchedule, Level, StageSchedule
from fractrain_fx.engine.schedules.plan import LoopLength, StagePlan, lacks_length, plan_stages

__all__ = [
    "AutoSchedule",
    "EpochSchedule",
    "Level",
    "LoopLength",
    "StagePlan",
    "StageSchedule",
    "lacks_length",
    "plan_stages",
]
