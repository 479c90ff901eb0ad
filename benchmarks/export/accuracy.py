"""``python -m benchmarks.export.accuracy RUN --python FRESH``: the test accuracy of a run here and in onnxruntime.

``RUN`` is a folder of ``fractrain train`` with a classifier of images, ``FRESH`` a Python with onnxruntime and numpy.
ResNet-20 on all of CIFAR-10, as in docs/how-to/deploying.md::

    fractrain train --model zoo:resnet20 --data cifar10 --data-dir DIR --image-size 16 --method pfq --epochs 4 \
        --batch-size 128 --optimizer sgd --lr 0.1 --out RUN
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.export.matrix import keep, results
from benchmarks.export.ties import one_step
from fractrain_fx.cli import main as fractrain
from fractrain_fx.training.data import make_loader
from fractrain_fx.training.data.loader import Share
from fractrain_fx.training.run import trained_model

_EQUAL = 1e-5  # of the largest logit: float32 adds in another order


def compared(run: Path, fresh: str) -> dict[str, Any]:
    """Accuracies in per cent, and how far logits are apart."""
    model, built = trained_model(run)
    model.eval()
    batches = list(make_loader(built.data, Share(100, 0, torch.device("cpu"))).test())
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    result: dict[str, Any] = {"samples": len(labels)}
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        np.save(place / "images.npy", images.numpy())
        for levels in ("exact", "integer"):
            folder = place / levels
            options = ["--to", "onnx", "--fold-batch-norm", "--levels", levels, "--out", str(folder)]
            assert fractrain(["export", str(run), *options]) == 0
            script, files = Path(__file__).parent / "classify.py", (folder / "model.onnx", place / "images.npy")
            alone = {"PATH": os.environ["PATH"]}  # without PYTHONPATH
            subprocess.run([fresh, script, *files, place / "logits.npy"], check=True, env=alone)
            there = torch.from_numpy(np.load(place / "logits.npy"))
            here = _logits(model.deployed(levels=levels), images)
            result[f"{levels}: onnxruntime"] = _accuracy(there, labels)
            result[f"{levels}: deployed"] = _accuracy(here, labels)
            result[f"{levels}: same classes"] = 100 * float((here.argmax(1) == there.argmax(1)).float().mean())
            apart = (here - there).abs().amax(1) / here.abs().max()
            result[f"{levels}: equal images"] = 100 * float((apart < _EQUAL).float().mean())
            result[f"{levels}: largest difference"] = float(apart.max())
        result["evaluation"] = _accuracy(_logits(model, images), labels)
    result["one code moved by one step"] = statistics.median(one_step(model, images[:4]))
    return result


@torch.no_grad()
def _logits(model: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    return torch.cat([model(batch) for batch in images.split(100)])


def _accuracy(logits: Tensor, labels: Tensor) -> float:
    return 100 * float((logits.argmax(1) == labels).float().mean())


def main() -> None:
    """Compare, and add the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--python", required=True, help="a Python with onnxruntime, without this package")
    parser.add_argument("--name", required=True, help="of the model and its data, for the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = compared(arguments.run, arguments.python)
    keep(arguments.name, accuracy=results().get("accuracy", {}) | {arguments.name: result})
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
