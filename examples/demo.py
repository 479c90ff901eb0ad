"""Train one small timm ResNet three ways on handwritten digits, and compare what it cost.

Float, static FW-8/BW-8 and FracTrain start from the same weights and see the same batches; everything in the table is
measured while they train. Each run stays in a folder under ``runs/demo``, which ``fractrain report`` reads.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

# Waiting threads sleep: on a machine that does something else too, spinning ones make each step several times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from fractrain_fx import FracConfig, GateConfig, RunConfig
from fractrain_fx.training import RunSettings, TrainSettings, new_run, results_table
from fractrain_fx.training.log import new_console

# On this easy task the paper's settings lose nothing, at a third of static's cost. Under them samples may skip a block,
# and skipping="left-out" leaves those samples out of it.
METHODS = {
    "float": FracConfig(method="float"),
    "static FW-8/BW-8": FracConfig(method="static"),
    "FracTrain": FracConfig.paper(gate=GateConfig(control="multiplier"), run=RunConfig(skipping="left-out")),
}
RUNS = Path("runs/demo")


def main(epochs: int = 30, seed: int = 0) -> None:
    console = new_console()
    settings = RunSettings(
        model="timm:resnet10t",
        data="digits",
        image_size=16,
        train=TrainSettings(epochs=epochs, batch_size=128, seed=seed),
    )
    results = []
    for label, config in METHODS.items():
        folder = RUNS / config.method
        shutil.rmtree(folder, ignore_errors=True)  # the run that an earlier demo left
        trainer = new_run(replace(settings, frac=config), folder, console)
        trainer.label = label
        results.append(trainer.fit())
    console.print(results_table(results, title=f"{settings.model} on {settings.data}, {epochs} epochs"))
    console.print(f"Next, the three runs as one page:\n\n    {report_command()}", highlight=False, soft_wrap=True)


def report_command() -> str:
    """Writes a report of the three runs; names the path of ``fractrain`` where the shell would not find it."""
    beside_python = os.path.relpath(Path(sys.executable).with_name("fractrain"))
    program = "fractrain" if shutil.which("fractrain") else beside_python
    runs = " ".join(str(RUNS / config.method) for config in METHODS.values())
    return f"{program} report {runs} --out {RUNS / 'report.html'}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and noise")
    main(seed=parser.parse_args().seed)
