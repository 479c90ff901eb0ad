"""docs/measured/results.md, made of docs/results/science.jsonl: means and spread, and accuracy against cost."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.page import markdown_table
from benchmarks.records import machine_words
from benchmarks.science.cells import cost_share, mean_and_range, signed
from benchmarks.science.figures import write_figures
from benchmarks.science.findings import findings, main_settings
from benchmarks.science.frontier import frontier
from benchmarks.science.named import METHODS, RETIRED, SETTINGS, TASKS
from benchmarks.science.overview import overview
from benchmarks.science.records import Group, Record, cp_error, difference, groups_of, static_at, static_of

__all__ = ["made_with", "write_page"]

_KNOWN = SETTINGS | RETIRED
_HEAD = (
    *("method", "setting", "epochs", "seeds", "last", "best", "to static", "MACs", "of static's", "cp off target"),
    *("MI", "configurations"),
)
_INTRO = """# Results

Whole trainings on all samples of their data sets, on a CPU: how accurate each method is and what it costs. Nothing on
this page is typed in: `python -m benchmarks.science page` writes it from [the results]({results}), a line for each run
with all of its epochs.
"""
# Task, epochs and title of the opening pictures.
_FRONTIERS = (
    ("resnet20-16px", 20, "ResNet-20 on all of CIFAR-10 at 16 pixels, 20 epochs"),
    ("characters", 4, "GPT-2 of two layers on characters of tiny-shakespeare, 4 epochs"),
)
_FRONTIER_WORDS = """## Accuracy against cost

The line joins uniform static precisions: a method pays where it is better than the line. Each cell of a table has the
best run that costs at most that share of static FW-8/BW-8 training.
"""
_TABLES = """
The first table of each task has every method in its setting with the most seeds; of several, the best and the best that
costs less than static training. Beside it stand static FW-8/BW-8 training over as many epochs (*to static*), and static
training over fewer epochs, which costs as much (*to static of its cost*).
"""
_COLUMNS = """## How to read the tables

- **last**, **best**: test {metric} after the last epoch, and the best of all; over several seeds their mean, with the
  lowest and highest in brackets.
- **to static**: the mean of last, less that of static FW-8/BW-8 after as many epochs: in points, or for language in
  nats (less is better).
- **MACs**: cost of the whole training in full-precision multiply-accumulates (`cp_total`, so float layers count too).
- **of static's**: that cost as a share of static FW-8/BW-8's over as many epochs.
- **cp off target**: the largest distance of an epoch's mean cp from its target, without the first epoch of each stage.
- **MI**: mutual information between sample and option in the last evaluation, in bits a block, mean over blocks. It is
  0 where a block gives all samples one option. **configurations**: how many different ones the test samples were given.
"""


_COMMAND = "python -m benchmarks.science run --grid main cost language --data-dir DIR"


def write_page(page: Path, results: Path, records: Sequence[Record]) -> None:
    """Write the page, and its figures beside the results."""
    place = Path(os.path.relpath(results, page.parent))
    groups = groups_of(records)
    metrics = sorted({record["metric"] for record in records})
    parts = [_INTRO.format(results=place), *_opening(groups, results.parent, place.parent), overview(groups), _TABLES]
    for task in (name for name in TASKS if any(group.task == name for group in groups)):
        mine = sorted((group for group in groups if group.task == task), key=_order)
        cost, epoch = (
            f"![{words}]({place.parent / path.name})" for path, words in write_figures(results.parent, task, mine)
        )
        parts += [f"## {task}", findings(mine), cost, _task_words(task, mine), _table(mine), epoch]
        for title, section in (
            ("Choices that do not depend on the input", _fixed),
            ("At equal cost", _equal_cost),
            ("One thing changed", _changed),
        ):
            if words := section(mine):
                parts += [f"### {title}", words]
    columns = _COLUMNS.format(metric=" or ".join(metrics) or "accuracy")
    parts += [columns, _settings_words(groups), made_with(records, _COMMAND)]
    page.write_text("\n\n".join(part.strip() for part in parts if part) + "\n", encoding="utf-8")


def _opening(groups: Sequence[Group], folder: Path, shown: Path) -> list[str]:
    """Accuracy against cost of the tasks that have static precisions of several costs."""
    parts = []
    for task, epochs, title in _FRONTIERS:
        figure = f"science-{task}-frontier.svg"
        if words := frontier(groups, task, epochs, folder / figure):
            parts += [f"### {title}", f"![{task}: test results against cost]({shown / figure})", words]
    return [_FRONTIER_WORDS, *parts] if parts else []


def _order(group: Group) -> tuple[Any, ...]:
    """Methods as in METHODS, the longest first."""
    return list(METHODS).index(group.method), group.setting != "default", group.setting, -group.epochs


def _task_words(task: str, groups: Sequence[Group]) -> str:
    values = _flat(TASKS[task])
    loop = ", ".join(f"`{name}` {value}" for name, value in values.items())
    names = " ".join(sorted({name for group in groups for name in group.setting.split("+")}))
    return f"{loop}. Settings ({names}) and columns are explained [below](#how-to-read-the-tables)."


def _table(groups: Sequence[Group]) -> str:
    static = {group.epochs: group for group in static_of(groups)}
    rows = []
    for group in groups:
        macs = group.mean("total_macs")
        base = static.get(group.epochs)
        share = cost_share(group, base) if base else ""
        errors = [error for error in map(cp_error, group.records) if error is not None]
        rows.append(
            (
                group.method,
                group.setting,
                str(group.epochs),
                str(len(group.records)),
                mean_and_range(group.values("value")),
                mean_and_range(group.values("best")),
                signed(difference(group, base), group.records[0]["metric"]),
                f"{macs:.3e}",
                share,
                f"{100 * max(errors):.1f} %" if errors else "",
                mean_and_range(group.at_end("mutual_information")),
                mean_and_range(group.at_end("configurations"), 0),
            )
        )
    return markdown_table(_HEAD, rows, text_columns=2)


def _equal_cost(groups: Sequence[Group]) -> str:
    """Each method beside static training with a whole schedule of the same cost."""
    static = static_of(groups)
    rows = []
    for group in groups:
        macs, value = (group.mean(name) for name in ("total_macs", "value"))
        same = None if group in static else static_at(macs, static)
        if same is not None:
            rows.append((group.method, group.setting, str(group.epochs), f"{macs:.3e}", f"{value:.2f}", f"{same:.2f}"))
    if not rows:
        return ""
    head = ("method", "setting", "epochs", "MACs", "last", "static at that cost")
    words = "Static training costs less with fewer epochs too. Its value lies between those of the two nearest costs."
    return f"{words}\n\n{markdown_table(head, rows, text_columns=2)}"


def _fixed(groups: Sequence[Group]) -> str:
    """Each gated method beside itself with one option a block."""
    rows = []
    for group in groups:
        tests = [record["fixed"] for record in group.records if record.get("fixed")]
        if tests:
            names = ("value", "shuffled_value", "fixed_value")
            values = [mean_and_range([test[name] for test in tests]) for name in names]
            cps = (100 * statistics.mean(test[name] for test in tests) for name in ("cp", "fixed_cp"))
            costs = (f"{cp:.2f} %" for cp in cps)
            rows.append((group.method, group.setting, str(group.epochs), *values, *costs))
    if not rows:
        return ""
    head = ("method", "setting", "epochs", "by input", "shuffled", "fixed", "cp by input", "cp fixed")
    words = (
        "This table shows what choosing by input is worth. It has the trained model as it is; with each sample's "
        "options given to another sample, at exactly the same cost; and with the option that most samples chose in "
        "each block given to all of them, where blocks get dearer options until that costs no less."
    )
    return f"{words}\n\n{markdown_table(head, rows, text_columns=2)}"


def _changed(groups: Sequence[Group]) -> str:
    """Each method's main setting beside those that differ from it in one name, at the same length."""
    rows = []
    for method, setting in main_settings(groups, static_of(groups)):
        for base in (group for group in groups if (group.method, group.setting) == (method, setting)):
            others = [group for group in groups if (group.method, group.epochs) == (method, base.epochs)]
            changes = [(change, group) for group in others if (change := _change(setting, group.setting))]
            for change, group in [("", base), *changes] if changes else []:
                rows.append(
                    (
                        *(method, change or f"{setting}, unchanged", str(base.epochs), str(len(group.records))),
                        mean_and_range(group.values("value")),
                        signed(difference(group, base), group.records[0]["metric"]),
                        cost_share(group, base),
                        mean_and_range(group.at_end("mutual_information")),
                    )
                )
    if not rows:
        return ""
    head = ("method", "change", "epochs", "seeds", "last", "to unchanged", "of its cost", "MI")
    words = "The settings of the first table, and runs that differ from them in one thing."
    return f"{words}\n\n{markdown_table(head, rows, text_columns=2)}"


def _change(setting: str, other: str) -> str | None:
    """The one name that another setting adds, leaves out or replaces; ``None`` if it differs by more."""
    old, new = ({*name.split("+")} - {"default"} for name in (setting, other))
    left_out, added = sorted(old - new), sorted(new - old)
    if max(len(left_out), len(added)) != 1:
        return None
    if not left_out:
        return f"with {added[0]}"
    if not added:
        return f"without {left_out[0]}"
    same_fields = _flat(_KNOWN[added[0]]).keys() == _flat(_KNOWN[left_out[0]]).keys()
    return f"{added[0]} for {left_out[0]}" if same_fields else None


def _settings_words(groups: Sequence[Group]) -> str:
    names = sorted({name for group in groups for name in group.setting.split("+")})
    rows = [(name, _fields(_KNOWN[name]) or "nothing") for name in names if name in _KNOWN]
    table = markdown_table(("name", "what it changes"), rows, text_columns=2)
    gone = [name for name in names if name in RETIRED]
    words = f"\n\nCommit 88ad369 was the last with {' and '.join(gone)}; their command runs there." if gone else ""
    return f"## Settings\n\n{table}{words}"


def _fields(setting: Mapping[str, Any]) -> str:
    """Fields and values as a configuration file has them."""
    return ", ".join(f"`{name}: {_plain(value)}`" for name, value in _flat(setting).items())


def _flat(setting: Mapping[str, Any]) -> dict[str, Any]:
    """The values by field; those of a group as ``gate.FIELD``."""
    flat: dict[str, Any] = {}
    for name, value in setting.items():
        flat |= (
            {f"{name}.{part}": each for part, each in value.items()} if isinstance(value, Mapping) else {name: value}
        )
    return flat


def _plain(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)


def made_with(records: Sequence[Record], command: str) -> str:
    """The command that makes the results, and the machines that made them."""
    machines = _distinct(machine_words(record["made_with"]) for record in records)
    return "\n\n".join(["## How they were made", f"```bash\n{command}\n```", *machines])


def _distinct(words: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(words))
