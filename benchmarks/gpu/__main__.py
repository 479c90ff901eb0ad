"""``python -m benchmarks.gpu``: all measurements that need an NVIDIA GPU, in under 9 minutes.

Parts run in order of worth, each in its own process: an error or a lack of time in one does not end the others. After
an error that leaves a process without its GPU, another one goes on.
Beside the first part, which times nothing, steps of the second are compiled. The results file and the page are written
after every part, and the file after every row too.
"""

from __future__ import annotations

from benchmarks.steady import steady

if __name__ == "__main__":
    steady(bound=False)

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.results import Found, Results, slug, write_page
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.standby import Standby, kill, standing_by, wait_to_be_told
from benchmarks.gpu.steps import compiled_items
from benchmarks.machine import describe, device_name, versions
from benchmarks.records import command

_DOCS, _PAGE = Path("docs"), Path("measured", "gpu.md")
_PACKAGES = ("torchao", "triton", "timm", "transformers")
# Seconds for writing the page at the end.
_RESERVE = 5.0
# The largest share of the time for steps that passes until they are compiled.
_COMPILING = 0.55
# Stands for the items of a part whose process has not begun.
_ALL = "all"
# The code with which a process ends when a kernel's error has spoiled its GPU for good.
_LOST = 75


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    options = parser.parse_args(argv)
    if options.device == "cpu" and (not options.small or options.out == _DOCS):
        parser.error("--device cpu only tries the code: write --small --device cpu --out FOLDER")
    if options.device == "cuda" and not torch.cuda.is_available():
        print("No NVIDIA GPU is here that torch can use, so nothing was measured.")
        return
    file = options.out / "results" / f"gpu-{slug(device_name(options.device))}.json"
    setting = Setting(options.device, options.small, 1 if options.small else 10)
    known = {item for part in options.parts for item in PARTS[part].items(setting)}
    if unknown := sorted(set(options.items) - known):
        parser.error(f"no item is called {unknown[0]!r}: {', '.join(map(repr, sorted(known)))}")
    if options.run:
        run = _run_told if options.wait else _run_items
        run(options.run, setting, options.items, file)
        return
    machine = describe(options.device) | versions(*_PACKAGES) | {"CUDA": str(torch.version.cuda)}
    results = Results(file, machine, command("benchmarks.gpu", argv, ["--out"]))
    if file.exists() and (older := Results.load(file)).machine == machine:
        results.parts = older.parts
        if options.items:
            results.command = older.command
    results.save()
    _run_parts(results, options, setting, argv)
    print(f"results: {file}, page: {options.out / _PAGE}")
    if failed := failures(results):
        raise SystemExit(f"{len(failed)} checks do not hold on this machine: {'; '.join(failed)}")


def failures(results: Results) -> list[str]:
    """The checks that do not hold."""
    rows = [row for item in results.parts.get("numerics", Found()).rows.values() for row in item]
    return [f"{row['check']} ({row['detail']})" for row in rows if row["holds"] != "yes"]


def _run_parts(results: Results, options: argparse.Namespace, setting: Setting, argv: Sequence[str]) -> None:
    """Run each part in a process, and give it its share of the time that is left."""
    end = time.monotonic() + 60 * options.minutes - _RESERVE
    call = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu", *argv]
    compiled = compiled_items(setting) if "steps" in options.parts else []
    wanted = [item for item in options.items or compiled if item in compiled]
    alone = {item: [*call, "--run", "steps", "--wait", "--items", item] for item in wanted}
    ready: list[str] | None = None
    with standing_by(alone, partial(_has_room, options.device)) as standby:
        for place, part in enumerate(options.parts):
            remaining = max(end - time.monotonic(), 0)
            seconds = remaining * PARTS[part].worth / sum(PARTS[later].worth for later in options.parts[place:])
            print(f"{PARTS[part].title}: up to {seconds:.0f} s", flush=True)
            began = time.monotonic()
            until = began + seconds
            results.parts[part] = _started(results.parts.get(part, Found()), options.items)
            results.save()
            if part != "numerics" and ready is None:  # what follows measures
                ready = standby.ready(_COMPILING * seconds)
            if part == "steps":
                _measure(results, standby, ready or [], until)
            lost = reason = f"its process ended with code {_LOST}"
            while reason == lost:  # a process that lost the GPU has left items to another one
                reason = wait_for_end(begin_process([*call, "--run", part]), until)
            results.parts = Results.load(results.path).parts
            outcome = results.parts[part]
            outcome.seconds += time.monotonic() - began
            outcome.not_run = {item: why or reason for item, why in outcome.not_run.items()}
            results.save()
            write_page(options.out / _PAGE, options.out / "results")


def _has_room(device: str) -> bool:
    """Whether half of the GPU's memory is free."""
    if device == "cpu":
        return True
    free, total = torch.cuda.mem_get_info()
    return free > total / 2


def _measure(results: Results, standby: Standby, ready: Sequence[str], until: float) -> None:
    """Let the processes that have compiled their steps measure, one at a time."""
    for item in ready:
        standby.measure(item, partial(wait_for_end, until=until))
    results.parts = Results.load(results.path).parts
    outcome = results.parts["steps"]
    outcome.not_run |= {
        item: "not compiled: no time or no memory was left" for item in standby.calls if item not in ready
    }
    outcome.not_run |= {item: "its process ended" for item in ready if item not in {*outcome.rows, *outcome.not_run}}
    results.save()


def _started(older: Found, chosen: Sequence[str]) -> Found:
    """A part that is to be run: all of it, or the chosen items beside the results of the others."""
    if not chosen:
        return Found(not_run={_ALL: ""})
    rows = {item: item_rows for item, item_rows in older.rows.items() if item not in chosen}
    not_run = {item: why for item, why in older.not_run.items() if item not in chosen}
    return Found(rows, not_run | {_ALL: ""}, older.seconds)


def begin_process(call: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(call, start_new_session=True)


def wait_for_end(child: subprocess.Popen[bytes], until: float) -> str:
    """Run a process until it ends or its time is over, and say which. Processes that it started end with it."""
    left = max(until - time.monotonic(), 0)
    try:
        return f"its process ended with code {child.wait(left)}"
    except subprocess.TimeoutExpired:
        return "the time of this part was over"
    finally:
        kill(child)
        child.wait()


def _run_items(part: str, setting: Setting, chosen: Sequence[str], file: Path) -> None:
    """Run the items of a part that an earlier process has not, and write the file after each row."""
    results = Results.load(file)
    all_items = PARTS[part].items(setting)
    items = {name: all_items[name] for name in chosen or all_items if name in all_items}
    outcome = results.parts[part]
    outcome.not_run.pop(_ALL, None)
    done = {*outcome.rows, *(name for name, reason in outcome.not_run.items() if reason)}
    outcome.not_run |= {name: "" for name in items if name not in done}
    results.save()
    for name, item in items.items():
        if name in done:
            continue
        began = time.monotonic()
        try:
            for row in item():
                outcome.rows.setdefault(name, []).append(dict(row))
                results.save()
        except Exception as error:
            outcome.not_run[name] = _reason(error)
        else:
            del outcome.not_run[name]
        results.save()
        print(f"  {name}: {time.monotonic() - began:.1f} s {outcome.not_run.get(name, '')}", flush=True)
        if outcome.not_run.get(name, "").startswith(torch.AcceleratorError.__name__):
            raise SystemExit(_LOST)


def _run_told(part: str, setting: Setting, chosen: Sequence[str], file: Path) -> None:
    """Prepare one item, and measure it and write the file when told to."""
    (name,) = chosen
    told: list[float] = []

    def wait() -> None:
        if not told:
            torch.cuda.empty_cache()
            wait_to_be_told()
            told.append(time.monotonic())

    rows, reason = [], ""
    try:
        rows = [dict(row) for row in PARTS[part].items(replace(setting, prepared=wait))[name]()]
    except Exception as error:
        reason = _reason(error)
    wait()
    results = Results.load(file)
    outcome = results.parts[part]
    if reason:
        outcome.not_run[name] = reason
    else:
        outcome.rows[name] = rows
    results.save()
    print(f"  {name}: {time.monotonic() - told[0]:.1f} s {reason}", file=sys.stderr, flush=True)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--minutes", type=float, default=9, help="time for all parts")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS), metavar="PART")
    parser.add_argument(
        "--items",
        nargs="+",
        default=[],
        metavar="ITEM",
        help="only these of the parts, beside the results of the others",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models and sizes, to try the code")
    parser.add_argument("--out", type=Path, default=_DOCS, help=f"folder of {_PAGE} and of results/gpu-NAME.json")
    parser.add_argument("--wait", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--run", choices=tuple(PARTS), help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
