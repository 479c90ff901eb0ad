"""ResNet-38 on a part of CIFAR-10 by four methods, on one core: ``docs/results.md`` and the metrics beside it.

``python -m benchmarks.cifar run sbm --data-dir DIR`` trains one of them, ``python -m benchmarks.cifar page`` writes the
page from the run folders.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch

from fractrain_fx.training import RunSettings, new_run

RUNS = Path("runs/cifar")
PAGE = Path("docs/results.md")

# All but the method. Two epochs a stage are too few for Algorithm 1, which needs five losses to compare.
COMMON: dict[str, Any] = {
    "model": "zoo:resnet38",
    "data": "cifar10",
    "subset": 1024,
    "test_subset": 200,
    "epochs": 8,
    "batch_size": 64,
    "lr": 0.1,
    "lr_schedule": "steps",
    "schedule": "manual",
    "weight_bits": 4,
    "device": "cpu",
    "seed": 0,
}


@dataclass(frozen=True)
class Row:
    """One run: its name, and its settings besides the common ones."""

    name: str
    settings: dict[str, Any]


ROWS = {
    "sbm": Row("SBM FW-8/BW-8", {"method": "static", "precision": "FW-8/BW-8"}),
    "pfq": Row("PFQ FW(3,4,6,8)/BW(6,6,8,8)", {"method": "pfq"}),
    "dfq": Row("DFQ cp 3 %", {"method": "dfq", "targets": [3.0]}),
    "fractrain": Row("FracTrain cp 1.5/2/2.5/3 %", {"method": "fractrain"}),
}


def run(key: str, data_dir: str) -> None:
    """Train one row; keeps its CPU time too, because wall time on a shared machine tells little."""
    out = RUNS / key
    settings = RunSettings.from_dict(COMMON | ROWS[key].settings | {"data_dir": data_dir})
    trainer = new_run(settings, out)
    started = time.process_time()
    trainer.fit()
    made = {
        "cpu_seconds": time.process_time() - started,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    (out / "made_with.json").write_text(json.dumps(made), encoding="utf-8")


def command(key: str) -> str:
    """The command that trains the same run."""
    settings = COMMON | ROWS[key].settings
    words = []
    for name, value in settings.items():
        words += [f"--{name.replace('_', '-')}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    return "fractrain train " + " ".join(words) + " --data-dir DIR"


def page() -> str:
    """The page, from the finished runs."""
    done = {key: RUNS / key for key in ROWS if (RUNS / key / "made_with.json").is_file()}
    made = [json.loads((out / "made_with.json").read_text(encoding="utf-8")) for out in done.values()]
    lines = [
        "# Results",
        "",
        "Written by `python -m benchmarks.cifar page` from the run folders; nothing in it is typed in.",
        "",
        "## ResNet-38 on a part of CIFAR-10, on a CPU",
        "",
        f"**Small, and far from the paper's setting**: {COMMON['subset']:,} training and {COMMON['test_subset']} test",
        f"images of 60,000, {COMMON['epochs']} epochs of batch {COMMON['batch_size']} (the paper: 50,000 images, 160",
        "epochs of batch 128), one seed, no GPU. Stages change at fixed epochs (`--schedule manual`), because",
        "Algorithm 1 needs five epochs to compare. The learning rate is 0.1, divided by ten after half and after three",
        "quarters of the run. These runs show that the methods train and what they cost; they do not compare",
        "accuracies: one test image is half a per cent, and no run is near its end.",
        "",
        "| run | test accuracy, % | best, % | mean cp, % | cp_total, % | MACs (32 bit) | of SBM's | CPU time, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    results = {key: json.loads((out / "result.json").read_text(encoding="utf-8")) for key, out in done.items()}
    for (key, result), facts in zip(results.items(), made, strict=True):
        share = f"{100 * result['total_macs'] / results['sbm']['total_macs']:.1f} %" if "sbm" in results else ""
        lines.append(
            f"| {ROWS[key].name} | {result['value']:.1f} | {result['best']:.1f} | {100 * result['mean_cp']:.2f} | "
            f"{100 * result['mean_cp_total']:.2f} | {result['total_macs']:.3e} | {share} | {facts['cpu_seconds']:.0f} |"
        )
    lines += ["", "Mean cp (%) of each epoch; targets of DFQ and FracTrain in brackets:", ""]
    lines += ["| run |" + "".join(f" {epoch} |" for epoch in range(1, COMMON["epochs"] + 1))]
    lines += ["|---|" + "---|" * COMMON["epochs"]]
    for key, out in done.items():
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        cells = [
            f"{100 * row['cp']:.2f}" + (f" ({row['level'].split()[1]})" if row["level"].startswith("cp") else "")
            for row in rows
        ]
        lines.append(f"| {ROWS[key].name} | " + " | ".join(cells) + " |")
    facts = made[0]
    lines += [
        "",
        f"One thread each on a shared machine with {facts['cores']} cores (AMD EPYC), torch {facts['torch']}, timm"
        f" {facts['timm']}, Python {facts['python']}.",
        "The CPU time includes evaluation. Low precision is simulated in float: its cost is counted, not felt.",
        "",
        "The commands, and the metrics that each wrote:",
        "",
    ]
    for key in done:
        lines += [f"[`results/{key}.jsonl`](results/{key}.jsonl):", "", "```bash", command(key), "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("run")
    train.add_argument("name", choices=ROWS)
    train.add_argument("--data-dir", required=True)
    commands.add_parser("page")
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments.name, arguments.data_dir)
        return
    PAGE.write_text(page(), encoding="utf-8")
    folder = PAGE.with_suffix("")
    folder.mkdir(exist_ok=True)
    for key in ROWS:
        metrics = RUNS / key / "metrics.jsonl"
        if metrics.is_file():
            shutil.copy(metrics, folder / f"{key}.jsonl")


if __name__ == "__main__":
    main()
