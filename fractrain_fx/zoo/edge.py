"""The paper's edge experiment: latency that FracTrain saves on a ZC706 against FW-8/BW-8, on CIFAR-100."""

from __future__ import annotations

from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fractrain_fx.hardware.zc706 import ZC706
from fractrain_fx.zoo.expected import expected
from fractrain_fx.zoo.recipe import load_recipe

__all__ = ["EDGE", "EdgeRow", "edge_markdown", "edge_rows", "edge_table"]

EDGE = "the edge experiment: latency saved on a ZC706"

_PRINTED = {"ResNet-38": 34.9, "ResNet-74": 36.6}  # per cent
_HEADINGS = ("model, CIFAR-100", "saved: paper, %", "saved: computed, %", "saved a sample: computed, %")


@dataclass(frozen=True)
class EdgeRow:
    """Latency saved by FracTrain against SBM, in per cent.

    Attributes:
        model: the model.
        paper: as printed.
        computed: for as many samples as the printed MACs of table 3 pay for.
        a_sample: for equally many samples.
    """

    model: str
    paper: float
    computed: float
    a_sample: float


def edge_rows() -> list[EdgeRow]:
    """The two rows of the experiment."""
    machine = ZC706()
    rows = []
    for model, printed in _PRINTED.items():
        seconds, samples = [], []
        for run in ("sbm", "fractrain"):
            recipe = load_recipe(f"table3-{model.lower().replace('-', '')}-cifar100-{run}")
            cost = expected(recipe.settings, machine)
            assert recipe.paper.macs is not None, "table 3 prints the MACs of every run"
            seconds.append(cost.seconds)
            samples.append(cost.samples_of(recipe.paper.macs))
        ratio = seconds[1] / seconds[0]
        rows.append(EdgeRow(model, printed, 100 * (1 - ratio * samples[1] / samples[0]), 100 * (1 - ratio)))
    return rows


def edge_table() -> Table:
    """The rows for a terminal."""
    shown = Table(title=f"{EDGE}, FracTrain against FW-8/BW-8", box=SIMPLE_HEAD, title_justify="left")
    for index, heading in enumerate(_HEADINGS):
        shown.add_column(heading.replace(": ", "\n"), justify="left" if index == 0 else "right")
    for row in edge_rows():
        shown.add_row(*_cells(row))
    return shown


def edge_markdown() -> str:
    """The rows for a page."""
    lines = [_HEADINGS, ("---", *["---:"] * (len(_HEADINGS) - 1)), *map(_cells, edge_rows())]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def _cells(row: EdgeRow) -> tuple[str, ...]:
    return row.model, *(f"{value:.1f}" for value in (row.paper, row.computed, row.a_sample))
