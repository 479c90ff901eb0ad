"""docs/results/science.md, made of docs/results/science.jsonl: every run, beside what it is compared with."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.page import markdown_table
from benchmarks.records import machine_words
from benchmarks.science.cells import cost_share, mean_and_range, signed
from benchmarks.science.findings import main_settings
from benchmarks.science.named import RETIRED, SETTINGS, TASKS
from benchmarks.science.records import Group, Record, cp_error, difference, of_setting, static_at, static_of

__all__ = ["task_words", "write_runs"]

_KNOWN = SETTINGS | RETIRED
_HEAD = (
    *("method", "setting", "epochs", "seeds", "last", "best", "to static", "MACs", "of static's", "cp off target"),
    *("MI", "configurations"),
)
_INTRO = """# All runs

Every training behind the [results]({page}). [The data]({results}) has a line for each run, with all of its epochs.

## How to read the tables

- **last**, **best**: test {metric} after the last epoch, and the best of all. Over several seeds it is the mean, with
  the lowest and highest in brackets.
- **to static**: last, less that of static FW-8/BW-8 after as many epochs, in points or for language in nats (less is
  better).
- **MACs**: cost of the whole training in full-precision multiply-accumulates (`cp_total`, so float layers count too).
- **of static's**: that cost as a share of static FW-8/BW-8's over as many epochs.
- **cp off target**: the largest distance of an epoch's mean cp from its target, without the first epoch of each stage.
- **MI**: mutual information between sample and option in the last evaluation, in bits a block, mean over blocks.
- **configurations**: the number of different combinations of options that the test samples got.
"""
_FIXED_WORDS = """The trained model as it is; with each sample's options given to another sample; and with each block's
most frequent option for all samples, where blocks get dearer options until that costs no less."""
_COMMAND = "python -m benchmarks.science run --grid main cost language --data-dir DIR"


def write_runs(page: Path, place: Path, results: Path, groups: Sequence[Group], records: Sequence[Record]) -> None:
    """Write the page of all runs.

    Args:
        page: its path.
        place: path of the page of results, as this page links to it.
        results: the data, in the same folder.
        groups: all groups of runs, by task and then as they are shown.
        records: the runs.
    """
    metrics = sorted({record["metric"] for record in records})
    parts = [_INTRO.format(page=place, results=results.name, metric=" or ".join(metrics) or "accuracy")]
    for task in dict.fromkeys(group.task for group in groups):
        mine = [group for group in groups if group.task == task]
        names = " ".join(sorted({name for group in mine for name in group.setting.split("+")}))
        parts += [f"## {task}", f"{task_words(task)}. [Settings](#settings): {names}.", _table(mine)]
        for title, section in (
            ("Choices that do not depend on the input", _fixed),
            ("At equal cost", _equal_cost),
            ("One thing changed", _changed),
        ):
            if words := section(mine):
                parts += [f"### {title}", words]
    parts += [_settings_words(groups), _made_with(records)]
    page.write_text("\n\n".join(part.strip() for part in parts if part) + "\n", encoding="utf-8")


def task_words(task: str) -> str:
    """The settings that make a task."""
    return ", ".join(f"`{name}` {value}" for name, value in _flat(TASKS[task]).items())


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
                signed(difference(group, base), group.metric),
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
    return f"{_FIXED_WORDS}\n\n{markdown_table(head, rows, text_columns=2)}"


def _changed(groups: Sequence[Group]) -> str:
    """Each method's main setting beside those that differ from it in one name, at the same length."""
    rows = []
    for method, setting in main_settings(groups, static_of(groups)):
        for base in of_setting(groups, method, setting):
            others = [group for group in groups if (group.method, group.epochs) == (method, base.epochs)]
            changes = [(change, group) for group in others if (change := _change(setting, group.setting))]
            for change, group in [("", base), *changes] if changes else []:
                rows.append(
                    (
                        *(method, change or f"{setting}, unchanged", str(base.epochs), str(len(group.records))),
                        mean_and_range(group.values("value")),
                        signed(difference(group, base), group.metric),
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
    fields = [_flat(_KNOWN.get(name, {})).keys() for name in (added[0], left_out[0])]  # none for widths of each op
    return f"{added[0]} for {left_out[0]}" if fields[0] == fields[1] and fields[0] else None


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
            {f"{name}.{part}": inner for part, inner in value.items()} if isinstance(value, Mapping) else {name: value}
        )
    return flat


def _plain(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)


def _made_with(records: Sequence[Record]) -> str:
    """The command that makes the results, and the machines that made them."""
    machines = dict.fromkeys(machine_words(record["made_with"]) for record in records)
    return "\n\n".join(["## How they were made", f"```bash\n{_COMMAND}\n```", *machines])
