"""Language data: words or characters of plain text files, and words of WikiText-103."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import TensorDataset

from fractrain_fx.errors import DataError
from fractrain_fx.training.data.dataset import DataSet

__all__ = ["blocks", "load_text"]

_END, _UNKNOWN = "<eos>", "<unk>"
_WIKITEXT = ("Salesforce/wikitext", "wikitext-103-v1")


def load_text(name: str, data_dir: Path | None, block_length: int) -> DataSet:
    """Words or characters, each to be predicted from those before it; the vocabulary is the training text's.

    Words are separated by blanks, and each line ends with ``<eos>``. A word or character of the test text that is not
    in the training text is ``<unk>``.

    Args:
        name: ``wikitext103`` or ``text`` (words), or ``characters``.
        data_dir: folder with one file whose name has "train" in it and one with "test". For ``wikitext103`` it may be
            left out: the library ``datasets`` then downloads it.
        block_length: words or characters in a sample.

    Raises:
        DataError: files are missing or too short, or the download failed.
    """
    if data_dir is not None:
        train, test = (_lines(_file(data_dir, part)) for part in ("train", "test"))
    elif name == "wikitext103":
        train, test = _wikitext()
    else:
        raise DataError(
            f"{name} is read from a folder: give data_dir=..., with files like train.txt and test.txt in it"
        )
    tokens: Callable[[Iterable[str]], Iterator[str]] = chain.from_iterable if name == "characters" else _words
    vocabulary: dict[str, int] = {_UNKNOWN: 0}
    # An array, because 103 million words as Python integers would take gigabytes.
    numbers = array("i", (vocabulary.setdefault(word, len(vocabulary)) for word in tokens(train)))
    test_numbers = array("i", (vocabulary.get(word, 0) for word in tokens(test)))
    parts = [torch.frombuffer(part, dtype=torch.int32) if part else torch.zeros(0) for part in (numbers, test_numbers)]
    shortest = min(map(len, parts)) - 1
    if not 1 <= block_length <= shortest:
        raise DataError(
            f"block_length={block_length} does not fit {name} ({len(parts[0])} training and {len(parts[1])} test "
            f"{'characters' if name == 'characters' else 'words'}): "
            + (f"write 1 to {shortest}" if shortest > 0 else "give it longer texts")
        )
    train_blocks, test_blocks = (blocks(part, block_length) for part in parts)
    return DataSet(name, "language", len(vocabulary), train_blocks, test_blocks)


def blocks(tokens: Int[Tensor, " n"], length: int) -> TensorDataset:
    """Neighbouring blocks of ``length`` tokens, each with the same block one token later."""
    count = (len(tokens) - 1) // length
    inputs, targets = (tokens[shift : shift + count * length].view(count, length) for shift in (0, 1))
    return TensorDataset(inputs, targets)


def _words(lines: Iterable[str]) -> Iterator[str]:
    return chain.from_iterable((*line.split(), _END) for line in lines)


def _file(data_dir: Path, part: str) -> Path:
    files = sorted(path for path in data_dir.glob(f"*{part}*") if path.is_file())
    if len(files) != 1:
        names = ", ".join(path.name for path in files) or "none"
        raise DataError(f"{data_dir} must hold one file with {part!r} in its name, like {part}.txt; found {names}")
    return files[0]


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error}): convert it first") from error


def _wikitext() -> tuple[Iterator[str], Iterator[str]]:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            "wikitext103 without data_dir=... is downloaded by the library datasets: "
            "pip install 'fractrain_fx[text]', or give the folder with the text files"
        ) from error
    try:
        train, test = (datasets.load_dataset(*_WIKITEXT, split=split) for split in ("train", "test"))
    except Exception as error:  # the library and its network layers may raise anything
        raise DataError(f"WikiText-103 could not be downloaded ({error}): give data_dir=...") from error
    return (row["text"] for row in train), (row["text"] for row in test)
