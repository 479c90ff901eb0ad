"""The test samples on which the gates spend most and fewest bits, kept with pictures for the report."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from fractrain_fx.durable import write_text
from fractrain_fx.engine.distributed import gather_over_ranks
from fractrain_fx.errors import RunError
from fractrain_fx.model import FracModel
from fractrain_fx.nn.cost import gated_meter

__all__ = ["SAMPLES", "Extremes", "Sample", "read_samples", "write_samples"]

SAMPLES = "samples.json"

_AT_EACH_END = 12
_SIDE = 64  # pixels of a picture, at most


T = TypeVar("T")


@dataclass(frozen=True)
class Sample:
    """A test sample.

    Attributes:
        cp: what its choices cost, as a share (0..1) of full precision over the gated ops.
        order: its place among all test samples by cost, from 0.
        picture: a PNG as a data URI; ``None`` where samples are not images.
    """

    cp: float
    order: int
    picture: str | None


class Extremes:
    """Watches the batches of an evaluation and keeps the dearest and the cheapest samples.

    Args:
        model: whose gates choose.
    """

    def __init__(self, model: FracModel) -> None:
        self._meter = gated_meter(model)
        self._held: list[tuple[float, Tensor]] = []
        self._count = 0

    def add(self, inputs: Tensor, choice: dict[str, Float[Tensor, "batch options"]]) -> None:
        """Take a batch that was evaluated just now; nothing where no gate chose."""
        if self._meter is None or not choice:
            return
        spent = self._meter.of_samples(list(choice.values()))
        self._count += len(spent)
        rows = _ends(spent.argsort(stable=True).tolist())
        self._held += zip(spent[rows].tolist(), inputs[rows].cpu(), strict=True)
        self._held = _ends(sorted(self._held, key=lambda pair: pair[0]))

    def read(self) -> list[Sample]:
        """The cheapest and the dearest of all processes, by cost; a collective."""
        parts = gather_over_ranks((self._count, self._held))
        total = sum(count for count, _ in parts)
        held = sorted((pair for _, part in parts for pair in part), key=lambda pair: pair[0])
        orders = _ends(list(range(total)))
        return [Sample(cp, order, _picture(x)) for order, (cp, x) in zip(orders, _ends(held), strict=True)]


def write_samples(samples: list[Sample], folder: Path) -> None:
    """Keep them in a run's folder.

    Raises:
        RunError: the disk is full, or the folder cannot be written to.
    """
    write_text(folder / SAMPLES, json.dumps([asdict(sample) for sample in samples]))


def read_samples(folder: Path) -> tuple[Sample, ...]:
    """What :func:`write_samples` wrote.

    Raises:
        RunError: the file holds something else.
    """
    try:
        return tuple(Sample(**values) for values in json.loads((folder / SAMPLES).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{folder / SAMPLES} holds no samples of a run ({error}): remove it") from error


def _ends(ordered: list[T]) -> list[T]:
    """The first and the last few."""
    return ordered[:_AT_EACH_END] + ordered[_AT_EACH_END:][-_AT_EACH_END:]


def _picture(x: Tensor) -> str | None:
    """An image of one or three channels, its values stretched to what a screen shows."""
    if x.ndim != 3 or x.shape[0] not in (1, 3) or not x.is_floating_point():
        return None
    from PIL import Image

    low, high = x.amin(), x.amax()
    bytes_ = ((x - low) / (high - low).clamp(min=1e-6) * 255).round().to(torch.uint8)
    image = Image.fromarray(bytes_.expand(3, -1, -1).permute(1, 2, 0).numpy())
    image.thumbnail((_SIDE, _SIDE))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
