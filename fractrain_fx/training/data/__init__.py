"""Data sets by name: sources of samples, splits, and batches."""

from __future__ import annotations

from pathlib import Path

from fractrain_fx.errors import DataError, near
from fractrain_fx.training.data.cifar import load_cifar
from fractrain_fx.training.data.dataset import DataSet, Task
from fractrain_fx.training.data.embedded import load_digits, load_pydoc, stand_in
from fractrain_fx.training.data.imagenet import load_image_folder
from fractrain_fx.training.data.loader import Loader, make_loader
from fractrain_fx.training.data.splits import draw_subset, phases_of
from fractrain_fx.training.data.text import load_text

__all__ = [
    "DATA_SETS",
    "IMAGES",
    "TEXTS",
    "DataSet",
    "Loader",
    "Task",
    "draw_subset",
    "load_dataset",
    "make_loader",
    "phases_of",
    "stand_in",
]

DATA_SETS = ("digits", "pydoc", "cifar10", "cifar100", "imagenet", "wikitext103", "text", "characters")
IMAGES = ("digits", "cifar10", "cifar100", "imagenet")
TEXTS = tuple(name for name in DATA_SETS if name not in IMAGES)


def load_dataset(name: str, *, data_dir: str | Path | None = None, block_length: int = 64) -> DataSet:
    """Load a data set.

    Args:
        name: ``digits`` and ``pydoc`` come with the package; ``cifar10``, ``cifar100`` and ``wikitext103`` are read
            from ``data_dir``, or downloaded without one; ``imagenet`` (any folder in its layout), ``text``
            and ``characters`` (any two text files, as words or as characters) are read from ``data_dir``.
        data_dir: folder of the files.
        block_length: words in a sample of text, or characters (``pydoc`` and ``characters``).

    Raises:
        DataError: the name is unknown, files are missing or damaged, or a block is longer than the text allows.
    """
    folder = None if data_dir is None else Path(data_dir).expanduser()
    if folder is not None and not folder.is_dir():
        raise DataError(f"data_dir={str(data_dir)!r} is not a folder: give the one that has {name}")
    if name in ("digits", "pydoc"):
        if folder is not None:
            raise DataError(f"{name} comes with the package: leave out data_dir={str(data_dir)!r}")
        return load_digits() if name == "digits" else load_pydoc(block_length)
    if name in ("cifar10", "cifar100"):
        return load_cifar(name, folder)
    if name == "imagenet":
        return load_image_folder(name, folder)
    if name in ("wikitext103", "text", "characters"):
        return load_text(name, folder, block_length)
    raise DataError(f"data set {name!r} is unknown: write one of {', '.join(DATA_SETS)}.{near(name, DATA_SETS)}")
