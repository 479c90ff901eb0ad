"""Packages that only some users need: each that is missing is named where it is needed, with what installs it."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from fractrain_fx.drawing import draw
from fractrain_fx.errors import DISTRIBUTIONS, EXTRAS, MissingPackageError
from fractrain_fx.execution.codes import kept
from fractrain_fx.training import RunSettings, TrainSettings, load_dataset, new_run
from tests.build import rewritten as build_rewritten

ROOT = Path(__file__).parents[1]
TINY = ROOT / "tests" / "training" / "tiny.py"
WANTED = {name: extra for extra, names in EXTRAS.items() for name in names}


def train(folder: Path) -> None:
    new_run(RunSettings(f"{TINY}:net", image_size=8, train=TrainSettings(epochs=1, device="cpu")), folder / "run")


def draw_model(folder: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    rewritten = build_rewritten(model, torch.randn(2, 4), method="static", check=True)
    assert draw(rewritten, folder / "net.graphml"), "needs no such package"
    draw(rewritten, folder / "net.dot")


def use_lightning(_: Path) -> None:
    importlib.import_module("fractrain_fx.integrations.lightning")


@pytest.mark.parametrize(
    ("package", "use"),
    [
        ("accelerate", train),
        ("filelock", train),
        ("sklearn", train),
        ("sklearn", lambda _: load_dataset("digits")),
        ("graphviz", draw_model),
        ("lightning", use_lightning),
    ],
)
def test_a_missing_package_is_named_with_what_installs_it(
    package: str, use: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*sys.modules]:
        if name.startswith((f"{package}.", "fractrain_fx.integrations.lightning")):
            monkeypatch.delitem(sys.modules, name)  # so that it is imported again
    monkeypatch.setitem(sys.modules, package, None)  # which importlib reads as missing
    name = DISTRIBUTIONS.get(package, package)
    with pytest.raises(MissingPackageError, match=rf"needs {name}: pip install 'fractrain_fx\[{WANTED[package]}\]'"):
        use(tmp_path)
    assert not (tmp_path / "run").exists() and not (tmp_path / "net.dot").exists()


def test_all_missing_packages_are_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("accelerate", "sklearn"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match="training needs accelerate and scikit-learn: pip install"):
        train(tmp_path)


def test_timings_are_not_kept_without_the_package_that_locks_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(kept.VARIABLE, str(tmp_path))
    monkeypatch.setitem(sys.modules, "filelock", None)
    with caplog.at_level("INFO"):
        kept.keep("kind", (1.0, 2.0))
    assert "pip install 'fractrain_fx[train]'" in caplog.text and list(tmp_path.iterdir()) == []


def test_the_extras_have_the_packages_that_messages_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    always = " ".join(project["dependencies"])
    for extra, names in EXTRAS.items():
        listed = " ".join(project["optional-dependencies"][extra])
        assert all(
            DISTRIBUTIONS.get(name, name) in listed and DISTRIBUTIONS.get(name, name) not in always for name in names
        )
        assert extra in project["optional-dependencies"]["dev"][0]


WITHOUT = """
import sys

for name in sys.argv[1].split(","):
    sys.modules[name] = None
import torch
from torch import nn

from fractrain_fx import Engine, FracConfig, FracModel, fractrainify, plan
from fractrain_fx.cli import main

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.body, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 10)

    def forward(self, x):
        x = self.stem(x).relu()
        x = x + self.body(x).relu()
        return self.head(x.mean((2, 3)))

x, y = torch.randn(8, 3, 8, 8), torch.randint(10, (8,))
print(plan(Net(), example_inputs=(x,)))
model = fractrainify(Net(), example_inputs=(x,))
engine, optimizer = Engine(model), torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    loss = engine.loss(nn.functional.cross_entropy(model(x), y))
    loss.backward()
    optimizer.step()
engine.end_epoch()
model.restore()
for command in ("plan timm:resnet10t --machine h200", "inspect hf:gpt2", "machines", "zoo list", "zoo table 3"):
    assert main(command.split()) == 0, command
assert main(["train"]) == 2
"""


@pytest.mark.long
def test_rewriting_and_the_command_line_need_none_of_them(tmp_path: Path) -> None:
    absent = [name for name in WANTED if name != "filelock"]  # which torch and huggingface_hub need themselves
    command = [sys.executable, "-c", WITHOUT, ",".join(absent)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = "fractrain train: training needs accelerate and scikit-learn: pip install"
    assert told in done.stderr and list(tmp_path.iterdir()) == []
