"""Train a small Transformer and a small ResNet in every recipe, and write docs/measured/format-results.md.

``python -m benchmarks.formats run --data-dir DIR`` trains the runs that are not finished, and goes on where it was
stopped; DIR holds tiny-shakespeare as train.txt and test.txt, and cifar-10-batches-py. ``list`` shows the progress of
each run, ``collect`` adds finished runs to the results, ``page`` writes the page. ``--grid formats`` are the recipes,
``--grid raise`` is MXFP4 with a switch to MXFP8; ``--seed 1 2`` with ``--task`` and ``--method`` adds seeds.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.formats.page import write_page
from benchmarks.science.__main__ import Home, main

FORMATS = Home(
    words=__doc__,
    program="python -m benchmarks.formats",
    runs=Path("runs/formats"),
    results=Path("docs/results/formats.jsonl"),
    page=Path("docs/measured/format-results.md"),
    write_page=write_page,
    grids=("formats", "raise"),
)

if __name__ == "__main__":
    sys.exit(main(home=FORMATS))
