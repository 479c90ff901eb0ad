"""Real sentences with real labels: lines of the documentation of two modules of the standard library."""

from __future__ import annotations

import inspect
import statistics
import tarfile
from types import ModuleType
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.data import Dataset

LENGTH, VOCABULARY = 12, 200


def sentences(module: ModuleType) -> list[str]:
    members = [module, *vars(module).values()]
    members += [each for member in vars(module).values() if inspect.isclass(member) for each in vars(member).values()]
    documents = {inspect.getdoc(each) or "" for each in members if getattr(each, "__module__", None) == module.__name__}
    lines = {line.strip() for document in documents for line in document.splitlines()}
    return sorted(line for line in lines if len(line.split()) > 3)


def encode(line: str) -> tuple[Tensor, Tensor]:
    """Words by their checksum, from 3 on; padding is 0 and masked."""
    words = [3 + crc32(word.lower().encode()) % (VOCABULARY - 3) for word in line.split()[:LENGTH]]
    tokens = torch.tensor(words + [0] * (LENGTH - len(words)))
    return tokens, (tokens > 0).long()


class WhichModule(Dataset[dict[str, Tensor]]):
    """Does a line come from ``statistics`` (0) or from ``tarfile`` (1)?"""

    def __init__(self, each: int) -> None:
        self.rows = []
        for label, module in enumerate((statistics, tarfile)):
            for line in sentences(module)[:each]:
                tokens, mask = encode(line)
                self.rows.append({"input_ids": tokens, "attention_mask": mask, "labels": torch.tensor(label)})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


class NextWord(WhichModule):
    """The same lines, for a causal language model: labels are the tokens, padding is ignored."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        return row | {"labels": row["input_ids"].masked_fill(row["attention_mask"] == 0, -100)}


def batch(rows: Dataset[dict[str, Tensor]], count: int = 2) -> dict[str, Tensor]:
    picked = [rows[index] for index in range(count)]
    return {name: torch.stack([row[name] for row in picked]) for name in picked[0]}
