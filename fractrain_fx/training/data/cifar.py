"""CIFAR-10 and CIFAR-100 in their usual layout, read without running code from the files.

The files are pickles, and a pickle may call any function. The reader admits the few names that an array of bytes needs
and refuses all others, so a foreign file can hold wrong images, but no code. The archive's checksum is not checked,
because a repacked copy is as good.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from fractrain_fx.durable import user_cache
from fractrain_fx.errors import DataError, require_packages
from fractrain_fx.training.data.dataset import DataSet

__all__ = ["load_cifar"]


@dataclass(frozen=True)
class _Layout:
    folder: str
    train: tuple[str, ...]
    test: str
    labels: str
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


# Means and standard deviations of the training images.
_LAYOUTS = {
    "cifar10": _Layout(
        "cifar-10-batches-py",
        tuple(f"data_batch_{number}" for number in range(1, 6)),
        "test_batch",
        "labels",
        10,
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
    ),
    "cifar100": _Layout(
        "cifar-100-python", ("train",), "test", "fine_labels", 100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    ),
}
_BYTES = 3 * 32 * 32


def load_cifar(name: str, data_dir: Path | None) -> DataSet:
    """CIFAR-10 or CIFAR-100 as bytes.

    Args:
        name: ``cifar10`` or ``cifar100``.
        data_dir: folder that holds ``cifar-10-batches-py`` (``cifar-100-python``), or that folder itself; ``None``: the
            user's cache, which torchvision fills if it is empty.

    Raises:
        DataError: files are missing, damaged or not CIFAR, or the download failed.
    """
    layout = _LAYOUTS[name]
    folder = _downloaded(name, layout) if data_dir is None else _find(data_dir, layout, name)
    missing = [file for file in (*layout.train, layout.test) if not (folder / file).is_file()]
    if missing:
        raise DataError(f"{folder} lacks {', '.join(missing)}: unpack the whole archive of the python version again")
    parts = [_read(folder / file, layout) for file in layout.train]
    train = TensorDataset(*(torch.cat(column) for column in zip(*parts, strict=True)))
    test = TensorDataset(*_read(folder / layout.test, layout))
    return DataSet(
        name,
        "classification",
        layout.classes,
        train,
        test,
        pixels=(layout.mean, layout.std),
        augmentations=("crop-flip", "none"),
    )


def _find(data_dir: Path, layout: _Layout, name: str) -> Path:
    for folder in (data_dir / layout.folder, data_dir):
        if (folder / layout.test).is_file():
            return folder
    raise DataError(
        f"{data_dir} holds no {name}: give the folder in which {layout.folder} lies (with {layout.train[0]} and "
        f"{layout.test} in it), or leave out data_dir to download it"
    )


def _downloaded(name: str, layout: _Layout) -> Path:
    """The data set's folder in the user's cache, filled if needed; other processes wait for the one that downloads."""
    require_packages("a download", "train")
    from filelock import FileLock

    cache = user_cache() / "fractrain_fx"
    folder = cache / layout.folder
    if (folder / layout.test).is_file():
        return folder
    try:
        from torchvision import datasets
        from torchvision.datasets.utils import download_and_extract_archive
    except ImportError as error:
        raise DataError(
            f"{name} is not in {cache}, and torchvision, which would download it, is not installed: give data_dir=..., "
            "or pip install torchvision"
        ) from error
    source = datasets.CIFAR10 if name == "cifar10" else datasets.CIFAR100
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{name}.lock"):
            if not (folder / layout.test).is_file():
                download_and_extract_archive(source.url, str(cache), filename=source.filename, md5=source.tgz_md5)
    except (OSError, RuntimeError) as error:  # no network, no room, another archive than expected
        raise DataError(
            f"{name} is not in {cache} and could not be downloaded from {source.url} ({error}): give data_dir=..."
        ) from error
    return folder


def _read(path: Path, layout: _Layout) -> tuple[Tensor, Tensor]:
    """Images [n, 3, 32, 32] in bytes and class numbers [n] of one file."""
    try:
        with path.open("rb") as file:
            content = _ArrayUnpickler(file, encoding="latin1").load()
    except DataError as error:
        raise DataError(f"{path} {error}") from error
    except Exception as error:  # a damaged pickle may raise anything
        raise DataError(f"{path} is damaged ({type(error).__name__}: {error}): unpack the archive again") from error
    return _checked(content, path, layout)


def _checked(content: Any, path: Path, layout: _Layout) -> tuple[Tensor, Tensor]:
    if isinstance(content, Mapping):  # Python 3 may have written the keys as bytes
        content = {key.decode() if isinstance(key, bytes) else key: value for key, value in content.items()}
        images, labels = content.get("data"), content.get(layout.labels)
        if (
            isinstance(images, np.ndarray)
            and images.dtype == np.uint8
            and isinstance(labels, list)
            and images.shape == (len(labels), _BYTES)
            and all(type(label) is int and 0 <= label < layout.classes for label in labels)
        ):
            return torch.from_numpy(images.copy()).view(-1, 3, 32, 32), torch.tensor(labels)
    raise DataError(
        f"{path} does not hold 'data' (bytes, {_BYTES} an image) and '{layout.labels}' (as many numbers below "
        f"{layout.classes}): unpack the archive again"
    )


def _latin1(text: str, encoding: str) -> bytes:
    """The form in which Python 3 writes bytes into an old pickle; no other encoding is accepted."""
    if encoding != "latin1":
        raise DataError(f"asks for the encoding {encoding!r}, which no CIFAR file needs: it was not opened")
    return text.encode("latin1")


class _ArrayUnpickler(pickle.Unpickler):
    """Reads numbers, text, lists, mappings and arrays; refuses everything else a pickle can name."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):
            return _latin1
        if module in ("numpy", "numpy.core.multiarray", "numpy._core.multiarray", "numpy._core.numeric"):
            admitted = {
                "ndarray": np.ndarray,
                "dtype": np.dtype,
                "_reconstruct": np.zeros(0, np.uint8).__reduce__()[0],
                "_frombuffer": lambda buffer, dtype, shape, order: np.frombuffer(buffer, dtype).reshape(
                    shape, order=order
                ),
            }
            if name in admitted:
                return admitted[name]
        raise DataError(f"asks for {module}.{name}, which no CIFAR file needs: it was not opened")
