"""``python -m benchmarks.coverage.corpus FOLDER``: put modules of public projects beside their rewrites.

FOLDER is the folder ``generated`` of a checkout of jansel/pytorch-jit-paritybench.
"""

from __future__ import annotations

import os

# Set before torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import argparse
import logging
import math
import random
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

# Imported before processes are forked, so that none of them has to.
import scipy  # noqa: F401
import torch._dynamo
import torch.export
import torchvision  # noqa: F401

import fractrain_fx.model
import fractrain_fx.passes  # noqa: F401
from benchmarks.coverage.corpus.modules import projects
from benchmarks.coverage.corpus.page import NO_MODULES, read_rows, section, summary, write_rows
from benchmarks.coverage.corpus.processes import examined
from benchmarks.coverage.corpus.trial import NO_WEIGHTS, PASSED, UNUSABLE, Row
from benchmarks.coverage.pool import Limits
from benchmarks.coverage.results import commit
from benchmarks.page import write_section

_GOOD = (PASSED, UNUSABLE, NO_MODULES)


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    files = projects(options.folder)
    if not files:
        sys.exit(f"{options.folder} holds no test_*.py: give the folder 'generated' of the corpus")
    order = sorted(files)
    random.Random(options.seed).shuffle(order)
    wanted = options.only or order[: options.projects]
    rows = read_rows(options.out)
    if options.retry:
        again = {row["project"] for row in rows if not _is_good(row)}
        rows = [row for row in rows if row["project"] not in again & set(wanted)]
    known = {row["project"] for row in rows}
    for name in wanted:
        if name in known:
            continue
        for row in examined(files[name], Limits(options.seconds, options.gib), options.heaviest):
            rows.append(row | {"commit": commit()})
            if row["verdict"] not in _GOOD:
                print(f"{name}/{row.get('name')}: {row['verdict']}: {row['verdict_cause']}", flush=True)
        write_rows(options.out, rows)
    print(summary(rows))
    if options.page:
        write_section(options.page, "corpus", section(rows))


def _is_good(row: Row) -> bool:
    return row["verdict"] in _GOOD and row.get("pfq", PASSED) in (PASSED, NO_WEIGHTS)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage.corpus", description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder 'generated' of the corpus")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines of all rows: its projects do not run again")
    parser.add_argument("--page", type=Path, help="Markdown page whose section about the corpus is written anew")
    parser.add_argument("--projects", type=int, default=200, help="size of the random sample")
    parser.add_argument("--seed", type=int, default=57, help="of the sample: the larger of two contains the smaller")
    parser.add_argument("--only", nargs="+", metavar="PROJECT", help="these projects in place of a sample")
    parser.add_argument("--retry", action="store_true", help="run projects again in which something did not pass")
    parser.add_argument("--seconds", type=float, default=60.0, help="processor time for each check of a module")
    parser.add_argument(
        "--heaviest", type=float, default=math.inf, help="seconds for four calls of a module; no larger"
    )
    parser.add_argument("--gib", type=float, default=8.0, help="memory for a project")
    return parser


if __name__ == "__main__":
    # For the processes that try the projects, too.
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    main()
