"""Train one small timm ResNet three ways on handwritten digits, and compare what it cost.

Float, static FW-8/BW-8 and FracTrain start from the same weights and see the same batches; everything in the table is
measured while they train.
"""

from __future__ import annotations

import os
from dataclasses import replace

# Waiting threads sleep: on a machine that does something else too, spinning ones make each step several times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from fractrain_fx import FracConfig
from fractrain_fx.training import RunSettings, TrainSettings, build_trainer, results_table
from fractrain_fx.training.log import new_console

METHODS = {
    "float": FracConfig(method="float"),
    "static FW-8/BW-8": FracConfig(method="static"),
    "FracTrain": FracConfig(method="fractrain"),
}


def main() -> None:
    console = new_console()
    settings = RunSettings(
        model="timm:resnet10t", data="digits", image_size=16, train=TrainSettings(epochs=30, batch_size=64)
    )
    results = []
    for label, config in METHODS.items():
        trainer = build_trainer(replace(settings, frac=config), label=label, console=console)
        results.append(trainer.fit())
    console.print(results_table(results, title=f"{settings.model} on {settings.data}, {settings.train.epochs} epochs"))


if __name__ == "__main__":
    main()
