"""Models of third-party libraries that this project does not know, small and with random weights.

``make coverage-libraries`` installs the libraries into a separate environment. The models of a library that is not
installed there, or in a version without the model, are not built.
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
    """All models, one library after the other in turn; the sample has the first two of each."""
    places: dict[str, int] = {}
    placed = []
    for entry in ENTRIES:
        place = places[entry.library] = places.get(entry.library, -1) + 1
        if not sample or place < 2:
            placed.append((place, Case("libraries", f"{entry.library}/{entry.name}", entry.library)))
    return [case for _, case in sorted(placed, key=lambda pair: pair[0])]


def build(case: Case) -> Ready:
    """The model of a case.

    Raises:
        NotBuiltError: its library is not installed, cannot be imported, or cannot build the model.
    """
    (entry,) = (candidate for candidate in ENTRIES if f"{candidate.library}/{candidate.name}" == case.name)
    return ready(entry)


def ready(entry: Entry) -> Ready:
    """A model with one batch.

    Raises:
        NotBuiltError: see :func:`build`.
    """
    try:
        release = version(entry.library)
    except PackageNotFoundError:
        raise NotBuiltError(f"{entry.library} is not installed: run make coverage-libraries") from None
    try:
        model, inputs = entry.make(), entry.inputs()
    except Exception as error:  # a release with other arguments, or a missing dependency
        raise NotBuiltError(f"{entry.library} {release}: {type(error).__name__}: {str(error)[:300]}") from error
    args: tuple[Any, ...] = () if isinstance(inputs, dict) else inputs
    kwargs: dict[str, Any] = inputs if isinstance(inputs, dict) else {}
    return Ready(model, entry.make, args, kwargs, {"library": entry.library, "release": release})
