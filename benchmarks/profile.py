"""``python -m benchmarks.profile``: where the time of an eager training step goes, by family of operators (CPU).

The profiler gives every operator's own time and the Python functions that called it. The package's functions among them
decide the family, or else the operator itself. Backward operators of the model's own layers have no such functions:
products are recognised by their names, and all others are the rest.
"""

from __future__ import annotations

from benchmarks.steady import steady

if __name__ == "__main__":
    steady()

import argparse
import ast
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import fractrain_fx
from benchmarks.machine import describe
from benchmarks.page import markdown_table, write_section
from benchmarks.records import command, machine_words, rich_table
from benchmarks.step.measure import seconds
from benchmarks.step.methods import Step, parse, prepare
from benchmarks.step.subjects import SUBJECTS

_PACKAGE = Path(fractrain_fx.__file__).parent
_FRAME = re.compile(r"(?:.*/)?fractrain_fx/(?P<file>.+\.py)\((?P<line>\d+)\): (?P<function>.+)")
_PRODUCTS = re.compile(
    r"aten::(conv|_conv|mkldnn_conv|slow_conv|thnn_conv|_slow_conv|mm$|bmm$|addmm|baddbmm|addbmm|linear|matmul|einsum"
    r"|_scaled_dot_product|scaled_dot_product|_int_mm)|mkldnn::"
)
GATE_GRADIENT, GATES, PRODUCTS = "gate gradient", "gates, skip and cost", "convolutions and products"
NOISE, RANGES, ROUNDING, REST = "noise", "ranges", "rounding", "rest of the model"
FAMILIES = (PRODUCTS, ROUNDING, RANGES, NOISE, GATE_GRADIENT, GATES, REST)
# Patterns for "file: qualified function" of a frame; the first rule that matches any frame decides.
_BY_FRAME: tuple[tuple[str, re.Pattern[str]], ...] = (
    (GATE_GRADIENT, re.compile(r"(?i).*: .*(gate_?grad|_gains?\b|activation_errors|_inner)")),
    (GATES, re.compile(r"(nn/(gates|cost)|engine/.*)\.py: ")),
)
_BY_FRAME_AFTER_PRODUCTS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (NOISE, re.compile(r"(?i).*(formats/noise\.py: |: .*(noise|dither))")),
    (RANGES, re.compile(r"(?i)(nn/ranges\.py: |.*: .*(measure|range|_ends))")),
    (ROUNDING, re.compile(r"(formats|nn|execution)/")),
)


def family(operator: str, frames: Sequence[str]) -> str:
    """The family of an operator, from the package's functions that called it (``file: qualified name``)."""
    for name, pattern in _BY_FRAME:
        if any(pattern.match(frame) for frame in frames):
            return name
    if _PRODUCTS.match(operator):
        return PRODUCTS
    for name, pattern in _BY_FRAME_AFTER_PRODUCTS:
        if any(pattern.match(frame) for frame in frames):
            return name
    return REST


def by_family(roots: Iterable[Any]) -> Counter[str]:
    """Nanoseconds of all operators below some nodes of the profiler's tree (without their children), by family."""
    spent: Counter[str] = Counter()
    pending: list[tuple[Any, tuple[str, ...]]] = [(root, ()) for root in roots]
    while pending:
        node, frames = pending.pop()
        if (frame := _FRAME.match(node.name)) is not None:
            frames = (
                *frames,
                f"{frame['file']}: {_qualified(_PACKAGE / frame['file'], int(frame['line']), frame['function'])}",
            )
        if _is_operator(node):
            inner = sum(operator.duration_time_ns for operator in _operators_below(node))
            spent[family(node.name, frames)] += node.duration_time_ns - inner
        pending += [(child, frames) for child in node.children]
    return spent


def _is_operator(node: Any) -> bool:
    name: str = node.name
    return name.startswith(("aten::", "mkldnn::", "torch::"))


def _operators_below(node: Any) -> Iterator[Any]:
    """The nearest operators inside a node."""
    for child in node.children:
        if _is_operator(child):
            yield child
        else:
            yield from _operators_below(child)


@cache
def _qualified(file: Path, line: int, function: str) -> str:
    """``Class.function`` for the file and first line of a function, which is all that the profiler gives."""
    for name, first, last in _classes(file):
        if first <= line <= last:
            return f"{name}.{function}"
    return function


@cache
def _classes(file: Path) -> list[tuple[str, int, int]]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [(n.name, n.lineno, n.end_lineno or n.lineno) for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]


def where(step: Step, repeats: int) -> tuple[float, dict[str, float]]:
    """Milliseconds of a step without the profiler (median), and of its operators by family (median of steps)."""
    for _ in range(3):
        step.run()
    wall = statistics.median(seconds(step.run, "cpu") for _ in range(repeats))
    traced: list[Counter[str]] = []
    for _ in range(repeats):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True) as profile:
            step.run()
        results = profile.profiler.kineto_results
        traced.append(by_family(results.experimental_event_tree()))
    return 1e3 * wall, {name: statistics.median(spent[name] for spent in traced) / 1e6 for name in FAMILIES}


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else list(argv)
    options = _parser().parse_args(argv)
    console = Console(width=max(Console().width, 130))  # a log file must not cut numbers off
    parts: list[str] = []
    for name in options.models:
        torch.manual_seed(0)
        subject = SUBJECTS[name]
        batch = subject.batch["cpu"]
        model, (x, y) = subject.build(), subject.data(batch)
        by_method = {
            method: where(prepare(parse(method), model, x, y, subject.loss), options.repeats)
            for method in options.methods
        }
        head, rows = ["family, ms a step (share)", *by_method], _rows(by_method)
        console.print(rich_table(f"{subject.title}, batch {batch}", head, rows))
        parts += [f"**{subject.title}, batch {batch}**", markdown_table(head, rows)]
    if options.table:
        how = f"`{command('benchmarks.profile', argv)}`; {machine_words(describe('cpu'))}."
        write_section(options.table, "benchmarks.profile", "\n\n".join([how, *parts]))


def _rows(by_method: dict[str, tuple[float, dict[str, float]]]) -> list[list[str]]:
    rows = [[name, *(_cell(spent[name], wall) for wall, spent in by_method.values())] for name in FAMILIES]
    # Operators take a little longer under the profiler, so their sum can exceed a step without it.
    between = [_cell(max(0.0, wall - sum(spent.values())), wall) for wall, spent in by_method.values()]
    return [
        *rows,
        ["between operators (Python)", *between],
        ["step", *(f"{wall:.1f}" for wall, _ in by_method.values())],
    ]


def _cell(ms: float, wall: float) -> str:
    return f"{ms:.1f} ({100 * ms / wall:.0f} %)"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--models", nargs="+", choices=tuple(SUBJECTS), default=["resnet38", "transformer-base"])
    parser.add_argument(
        "--methods", nargs="+", default=["float", "pfq", "dfq"], help="eager methods of benchmarks.step"
    )
    parser.add_argument("--repeats", type=int, default=5, help="steps, with the profiler and without")
    parser.add_argument(
        "--table", type=Path, help="write to this Markdown page, between <!-- benchmarks.profile --> lines"
    )
    return parser


if __name__ == "__main__":
    main()
