"""What a run tells and keeps of itself: lines, records of epochs and starts, results."""

from fractrain_fx.training.log.run_log import RunLog, new_console

__all__ = ["RunLog", "new_console"]
