"""``python -m benchmarks.gpu``: all measurements that need an NVIDIA GPU, in under 9 minutes.

Parts run in order of worth, each in its own process: an error or a lack of time in one does not end the others. After
an error that leaves a process without its GPU, another one goes on.
The results file and the page are written after every part, and the file after every row too.
"""

from __future__ import annotations

from benchmarks.steady import steady

if __name__ == "__main__":
    steady(bound=False)

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.results import Found, Results, slug, write_page
from benchmarks.gpu.setting import Setting
from benchmarks.machine import describe, device_name, versions
from benchmarks.records import command

_DOCS = Path("docs")
_PACKAGES = ("torchao", "triton", "timm", "transformers")
# Seconds for writing the page at the end.
_RESERVE = 5.0
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
    if options.run:
        _run_items(options.run, Setting(options.device, options.small, 1 if options.small else 10), file)
        return
    machine = describe(options.device) | versions(*_PACKAGES) | {"CUDA": str(torch.version.cuda)}
    results = Results(file, machine, command("benchmarks.gpu", argv, ["--out"]))
    if file.exists() and (older := Results.load(file)).machine == machine:
        results.parts = older.parts
    results.save()
    _run_parts(results, options, argv)
    print(f"results: {file}, page: {options.out / 'gpu.md'}")
    if failed := failures(results):
        raise SystemExit(f"{len(failed)} checks do not hold on this machine: {'; '.join(failed)}")


def failures(results: Results) -> list[str]:
    """The checks that do not hold."""
    rows = [row for item in results.parts.get("numerics", Found()).rows.values() for row in item]
    return [f"{row['check']} ({row['detail']})" for row in rows if row["holds"] != "yes"]


def _run_parts(results: Results, options: argparse.Namespace, argv: Sequence[str]) -> None:
    """Run each part in a process, and give it its share of the time that is left."""
    end = time.monotonic() + 60 * options.minutes - _RESERVE
    for place, part in enumerate(options.parts):
        remaining = max(end - time.monotonic(), 0)
        seconds = remaining * PARTS[part].worth / sum(PARTS[each].worth for each in options.parts[place:])
        print(f"{PARTS[part].title}: up to {seconds:.0f} s", flush=True)
        began = time.monotonic()
        call = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu", *argv, "--run", part]
        results.parts[part] = Found(not_run={"all": ""})
        results.save()
        lost = reason = f"its process ended with code {_LOST}"
        while reason == lost:  # a process that lost the GPU has left items to another one
            reason = _ended(call, began + seconds - time.monotonic())
        results.parts = Results.load(results.path).parts
        found = results.parts[part]
        found.seconds = time.monotonic() - began
        found.not_run = {item: why or reason for item, why in found.not_run.items()}
        results.save()
        write_page(options.out / "gpu.md", options.out / "results")


def _ended(call: Sequence[str], seconds: float) -> str:
    """Run a process until it ends or its time is over, and say which. Processes that it started end with it."""
    with subprocess.Popen(call, start_new_session=True) as child:
        try:
            return f"its process ended with code {child.wait(seconds)}"
        except subprocess.TimeoutExpired:
            return f"the {seconds:.0f} s of this part were over"
        finally:
            with contextlib.suppress(ProcessLookupError):  # nothing is left
                os.killpg(child.pid, signal.SIGKILL)


def _run_items(part: str, setting: Setting, file: Path) -> None:
    """Run the items of a part that an earlier process has not, and write the file after each row."""
    results = Results.load(file)
    items = PARTS[part].items(setting)
    found = results.parts[part]
    failed = {name: reason for name, reason in found.not_run.items() if reason and name in items}
    done = {*found.rows, *failed}
    found.not_run = {name: failed.get(name, "") for name in items if name in failed or name not in done}
    results.save()
    for name, item in items.items():
        if name in done:
            continue
        began = time.monotonic()
        try:
            for row in item():
                found.rows.setdefault(name, []).append(dict(row))
                results.save()
        except Exception as error:
            found.not_run[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        else:
            del found.not_run[name]
        results.save()
        print(f"  {name}: {time.monotonic() - began:.1f} s {found.not_run.get(name, '')}", flush=True)
        if found.not_run.get(name, "").startswith(torch.AcceleratorError.__name__):
            raise SystemExit(_LOST)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--minutes", type=float, default=9, help="time for all parts")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS), metavar="PART")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models and sizes, to try the code")
    parser.add_argument("--out", type=Path, default=_DOCS, help="folder of gpu.md and of results/gpu-NAME.json")
    parser.add_argument("--run", choices=tuple(PARTS), help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
