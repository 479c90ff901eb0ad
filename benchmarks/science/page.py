"""docs/measured/results.md, made of docs/results/science.jsonl: accuracy against cost, and each task in short."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.science.figures import write_figures
from benchmarks.science.findings import by_input, findings
from benchmarks.science.frontier import frontier
from benchmarks.science.named import METHODS, TASKS
from benchmarks.science.overview import beside_static, overview
from benchmarks.science.protocol import protocol
from benchmarks.science.records import Group, Record, groups_of
from benchmarks.science.runs import task_words, write_runs

__all__ = ["write_page"]

# Task, epochs and title of the opening pictures.
_FRONTIERS = (
    ("resnet20-16px", 20, "ResNet-20 on all of CIFAR-10 at 16 pixels"),
    ("characters", 4, "GPT-2 of two layers on characters of tiny-shakespeare"),
)
_FRONTIER_WORDS = """The line joins static precisions; a method above it pays. Each column is a budget, as a share of
static FW-8/BW-8's cost. A cell has the best mean within it, and its seeds' range. Settings of several
seeds come before single runs, which have no brackets."""
_TASKS_WORDS = """## Each task

The tables have every method in its setting with the most seeds. If several are level, they have the best one, and the
best one that costs less than static training.

- **to static**: the distance to static FW-8/BW-8 training over as many epochs, in points or nats.
- **its cost**: as a share of that training's cost.
- **to static of its cost**: the distance to static training over fewer epochs, which costs as much."""


def write_page(page: Path, results: Path, records: Sequence[Record]) -> None:
    """Write the page, and beside the results their figures and a page of all runs."""
    place = Path(os.path.relpath(results, page.parent))
    runs = results.with_suffix(".md")
    groups = sorted(groups_of(records), key=_order)
    tasks = {task: [group for group in groups if group.task == task] for task in TASKS}
    parts = ["# Results", *_opening(groups, results.parent, place.parent), protocol(groups)]
    parts += [overview(groups), by_input(groups)]
    parts += [_where_from(place, place.with_name(runs.name)), _TASKS_WORDS]
    for task, mine in tasks.items():
        if not (text := findings(mine)):
            continue
        figures = [
            f"![{words}]({place.parent / path.name})" for path, words in write_figures(results.parent, task, mine)
        ]
        parts += [f"### {task}", f"{task_words(task)}.", text, *figures]
    page.write_text("\n\n".join(part.strip() for part in parts if part) + "\n", encoding="utf-8")
    write_runs(runs, Path(os.path.relpath(page, runs.parent)), results, groups, records)


def _order(group: Group) -> tuple[Any, ...]:
    """Tasks and methods as they are listed, the longest first."""
    places = (list(TASKS).index(group.task), list(METHODS).index(group.method))
    return *places, group.setting != "default", group.setting, -group.epochs


def _opening(groups: Sequence[Group], folder: Path, shown: Path) -> list[str]:
    """Accuracy against cost of the tasks that have static precisions of several costs."""
    parts: list[str] = []
    for task, epochs, title in _FRONTIERS:
        figure = f"science-{task}-frontier.svg"
        if words := frontier(groups, task, epochs, folder / figure):
            picture = f"![Test results against cost]({shown / figure})"
            heading = f"## {title}" if parts else ""
            parts += [heading, picture, beside_static(groups, task, epochs, title)]
            parts += [words] if heading else [_FRONTIER_WORDS, words]
    return parts


def _where_from(results: Path, runs: Path) -> str:
    return (
        f"[All runs]({runs}) have their spread over seeds, and the meaning of each setting. All trainings are whole, "
        f"on a CPU. `python -m benchmarks.science page` writes both pages from [the data]({results})."
    )
