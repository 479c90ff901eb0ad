"""The paper's whole training beside its table 3, in docs/measured/results.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.page import markdown_table
from benchmarks.science.cells import mean_and_range, signed
from benchmarks.science.records import Group, of_setting, static_of
from fractrain_fx.zoo.recipe import load_recipe

__all__ = ["protocol"]

_TASK, _EPOCHS, _LAST = "resnet20-16px", 160, 10
_PAPER = ("resnet38", "resnet74")
_METHODS = ("sbm", "fractrain")
_WORDS = f"""## The paper's training

{_EPOCHS} epochs, the rate divided by ten after a half and three quarters, beside table 3 (larger networks): the best
evaluation, its distance to static, and the mean of the last {_LAST}. MACs are shares of static FW-8/BW-8's, in the
paper up to the best evaluation."""


def protocol(groups: Sequence[Group]) -> str:
    """A row for each setting trained that long and for the paper's own; empty before the first such run."""
    mine = [group for group in groups if (group.task, group.epochs) == (_TASK, _EPOCHS)]
    if not mine:
        return ""
    static = next(iter(of_setting(mine, "static", "drops")), None)
    priced = next(group for group in static_of(groups) if group.task == _TASK)
    rows = [_row(group, static, priced.mean("total_macs") / priced.epochs) for group in mine]
    head = ("network", "method", "setting", "seeds", "best accuracy", "to static", "last ten", "MACs")
    return f"{_WORDS}\n\n{markdown_table(head, [*rows, *_paper_rows()], text_columns=3)}"


def _row(group: Group, static: Group | None, epoch_macs: float) -> tuple[str, ...]:
    """One setting; an epoch of static FW-8/BW-8 costs the same in a training of any length."""
    far = "" if static is None or static is group else signed(group.mean("best") - static.mean("best"), "accuracy")
    share = _per_cent(group.mean("total_macs") / (epoch_macs * group.epochs))
    best = mean_and_range(group.values("best"))
    last = statistics.mean(point["value"] for record in group.records for point in record["points"][-_LAST:])
    seeds = str(len(group.records))
    return ("ResNet-20, 16 pixels", group.method, group.setting, seeds, best, far, f"{last:.2f}", share)


def _paper_rows() -> Iterator[tuple[str, ...]]:
    for network in _PAPER:
        (accuracy, macs), (dynamic, fewer) = (_printed(f"table3-{network}-cifar10-{method}") for method in _METHODS)
        name = f"ResNet-{network.removeprefix('resnet')}, 32 pixels"
        far = signed(dynamic - accuracy, "accuracy")
        yield (name, "fractrain", "the paper's", "", f"{dynamic:.2f}", far, "", _per_cent(fewer / macs))


def _printed(recipe: str) -> tuple[float, float]:
    paper = load_recipe(recipe).paper
    assert paper.accuracy is not None and paper.macs is not None, "table 3 prints both for every run"
    return paper.accuracy, paper.macs


def _per_cent(share: float) -> str:
    return f"{100 * share:.0f} %"
