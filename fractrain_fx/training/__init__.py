"""Training on accelerate: data sets, models by name, the Trainer, checkpoints and reports of a run."""

from fractrain_fx.training.data import DATA_SETS, DataSet, load_dataset
from fractrain_fx.training.log.results import RunResult, results_table
from fractrain_fx.training.models import build_model
from fractrain_fx.training.run import build_trainer, new_run, resume_run
from fractrain_fx.training.settings import RunSettings, TrainSettings
from fractrain_fx.training.trainer import Trainer

__all__ = [
    "DATA_SETS",
    "DataSet",
    "RunResult",
    "RunSettings",
    "TrainSettings",
    "Trainer",
    "build_model",
    "build_trainer",
    "load_dataset",
    "new_run",
    "results_table",
    "resume_run",
]
