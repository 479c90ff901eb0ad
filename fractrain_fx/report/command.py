"""``fractrain report``: read runs, lay out panels, write the page and on request the plots."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from fractrain_fx.errors import RunError, require_packages

__all__ = ["write_report"]


def write_report(runs: Sequence[str], out: Path, *, plots: Path | None = None, epochs: Sequence[int] = ()) -> None:
    """Write the report of some runs, and print its path.

    Args:
        runs: folders of runs, or ``NAME=FOLDER``.
        out: the HTML file.
        plots: folder for the same plots as SVG and PNG.
        epochs: epochs of the bit allocations to draw; by default those at the end of each stage.

    Raises:
        MissingPackageError: a library is missing.
        RunError: a run cannot be read, or a file cannot be written.
    """
    require_packages("a report", "report")
    from fractrain_fx.durable import write_text
    from fractrain_fx.report.page import render_page, write_plots
    from fractrain_fx.report.panels import build_sheet
    from fractrain_fx.report.runs import read_runs

    if out.is_dir() or not out.name:
        raise RunError(f"{out} is a folder: name a file, --out {out / 'report.html'}")
    loaded = read_runs(runs)
    for run in loaded:
        for note in run.notes:
            print(f"{run.name}: {note}", file=sys.stderr)
    sheet = build_sheet(loaded, epochs)
    page = render_page(loaded, sheet)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, page)
    except OSError as error:
        raise RunError(f"the report could not be written to {out} ({error}): give another --out") from error
    print(f"report: {out} ({len(page.encode()) / 1e6:.1f} MB)")
    if plots is not None:
        print(f"plots: {len(write_plots(sheet, plots))} files in {plots}")
