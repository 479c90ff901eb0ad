"""Data sets: sources of samples, splits, and batches."""

from fractrain_fx.training.data.dataset import DataSet, Task
from fractrain_fx.training.data.loader import Loader, make_loader
from fractrain_fx.training.data.sources import DATA_SETS, load_dataset, stand_in
from fractrain_fx.training.data.splits import draw_subset, phases_of

__all__ = [
    "DATA_SETS",
    "DataSet",
    "Loader",
    "Task",
    "draw_subset",
    "load_dataset",
    "make_loader",
    "phases_of",
    "stand_in",
]
