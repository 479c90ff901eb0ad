"""Models of third-party libraries that this project knows nothing of, small and with random weights.

They are installed into an environment of their own: ``make coverage-libraries``. A library that is not installed there,
or not in a version that has the model, is not built.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from benchmarks.coverage.cases import Case, NotBuiltError, Ready
from benchmarks.coverage.libraries import (
    density,
    diffusion,
    graphs,
    segmentation,
    sequence,
    series,
    spiking,
    tabular,
    vision,
)
from benchmarks.coverage.libraries.entry import Entry

__all__ = ["ENTRIES", "build", "cases", "ready"]

ENTRIES: tuple[Entry, ...] = tuple(
    entry
    for domain in (vision, segmentation, sequence, diffusion, graphs, series, tabular, density, spiking)
    for entry in domain.ENTRIES
)


def cases(sample: bool) -> list[Case]:
    """All of them, the libraries in turn; the sample has the first two of each."""
    places: dict[str, int] = {}
    found = []
    for entry in ENTRIES:
        place = places[entry.library] = places.get(entry.library, -1) + 1
        if not sample or place < 2:
            found.append((place, Case("libraries", f"{entry.library}/{entry.name}", entry.library)))
    return [case for _, case in sorted(found, key=lambda each: each[0])]


def build(case: Case) -> Ready:
    """The model of a case.

    Raises:
        NotBuiltError: its library is not installed, or cannot be loaded or build the model.
    """
    (entry,) = (each for each in ENTRIES if f"{each.library}/{each.name}" == case.name)
    return ready(entry)


def ready(entry: Entry) -> Ready:
    """A model with one batch.

    Raises:
        NotBuiltError: as for :func:`build`.
    """
    try:
        release = version(entry.library)
    except PackageNotFoundError:
        raise NotBuiltError(f"{entry.library} is not installed: run make coverage-libraries") from None
    try:
        model, inputs = entry.make(), entry.inputs()
    except Exception as error:  # a release with other arguments, a dependency that is missing
        raise NotBuiltError(f"{entry.library} {release}: {type(error).__name__}: {str(error)[:300]}") from error
    args: tuple[Any, ...] = () if isinstance(inputs, dict) else inputs
    kwargs: dict[str, Any] = inputs if isinstance(inputs, dict) else {}
    return Ready(model, entry.make, args, kwargs, {"library": entry.library, "release": release})
