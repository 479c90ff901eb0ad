"""Output and records of a run: printed lines, records of epochs and starts, results."""

from fractrain_fx.training.log.run_log import RunLog, new_console

__all__ = ["RunLog", "new_console"]
