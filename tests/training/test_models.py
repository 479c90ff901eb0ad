"""Every way to name a model, and what happens to names that mean nothing."""

import sys
from pathlib import Path

import pytest
import torch

from fractrain_fx.errors import ModelError
from fractrain_fx.training.data import DataSet, load_dataset
from fractrain_fx.training.models import build_model, zoo_models

TINY = Path(__file__).with_name("tiny.py")


@pytest.fixture(scope="module")
def digits() -> DataSet:
    return load_dataset("digits")


@pytest.fixture(scope="module")
def text() -> DataSet:
    return load_dataset("pydoc", block_length=16)


@pytest.mark.parametrize(
    ("name", "side"),
    [("timm:resnet10t", 32), ("timm:vit_tiny_patch16_224", 224), ("hf:vit", 32), ("hf:deit", 32), (f"{TINY}:net", 32)],
)
def test_image_models_fit_the_data(name: str, side: int, digits: DataSet) -> None:
    built = build_model(name, digits)
    args, kwargs = built.examples()
    assert next(iter(args or kwargs.values())).shape == (2, 3, side, side)
    output = built.model(*args, **kwargs)
    assert getattr(output, "logits", output).shape == (2, 10)


@pytest.mark.parametrize("name", ["hf:gpt2", "hf:llama", "hf:bert", "hf:mixtral"])
def test_language_models_fit_the_data(name: str, text: DataSet) -> None:
    built = build_model(name, text)
    _, kwargs = built.examples()
    assert built.input_name == "input_ids"
    assert built.model(**kwargs).logits.shape == (2, 16, text.classes)
    assert sum(p.numel() for p in built.model.parameters()) < 2e6


def test_the_image_size_can_be_chosen(digits: DataSet) -> None:
    assert build_model("timm:vit_tiny_patch16_224", digits, image_size=32).data.shape == (3, 32, 32)
    assert build_model("timm:resnet10t", digits, image_size=48).data.shape == (3, 48, 48)


def test_the_zoo_is_resolved_by_name(digits: DataSet, text: DataSet) -> None:
    assert {"resnet38", "mobilenetv2", "transformer_base"} <= set(zoo_models())
    assert isinstance(build_model("zoo:resnet38", digits).model, torch.nn.Module)
    with pytest.raises(ModelError, match="vocab_size"):
        build_model("zoo:transformer_base", digits)


def test_without_data_a_model_keeps_its_own_sizes() -> None:
    built = build_model("timm:resnet18")
    assert built.model.num_classes == 1000 and built.data.shape == (3, 224, 224)
    assert build_model("hf:gpt2").input_name == "input_ids"
    assert build_model(f"{TINY}:net").examples()[0][0].shape == (2, 3, 32, 32)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("timm:resnet118", "timm:resnet18"),
        ("hf:gpt22", "hf:gpt2"),
        ("zoo:resnet37", "zoo:resnet38"),
        ("resnet18", "timm:NAME"),
        ("torch:resnet18", "timm:NAME"),
        ("timm:", "timm:NAME"),
        ("nowhere.py:net", "not a file"),
        (f"{TINY}:nett", "'net'"),
        (f"{TINY}:nothing", "NoneType"),
        (f"{TINY}:", "which function"),
        ("hf:gpt2", "classification"),
    ],
)
def test_a_name_without_a_model_says_what_to_write(name: str, message: str, digits: DataSet) -> None:
    with pytest.raises(ModelError, match=message):
        build_model(name, digits)


@pytest.mark.parametrize(("name", "kind"), [("yolos", "ObjectDetection"), ("t5", "ConditionalGeneration")])
def test_types_of_other_tasks_are_built_with_inputs_of_their_own_to_be_looked_at(name: str, kind: str) -> None:
    built = build_model(f"hf:{name}")
    args, kwargs = built.examples()
    assert kind in type(built.model).__name__ and built.model(*args, **kwargs) is not None
    with pytest.raises(ModelError, match="own image size"):
        build_model(f"hf:{name}", image_size=64)


def test_a_model_of_the_other_task_is_refused(text: DataSet) -> None:
    with pytest.raises(ModelError, match="classification"):
        build_model("timm:resnet10t", text)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("1 / 0", r"net failed in line 1: ZeroDivisionError: division by zero"),
        ("def net(:", r"net failed: SyntaxError"),
        ("def net():\n    raise KeyError('a')", r"net failed in line 2: KeyError: 'a'"),
        (
            "def net(width, num_classes, *rest): ...",
            r"net needs width, .* all arguments but image_size and num_classes",
        ),
        ("net = 3", "has no function 'net'"),
    ],
)
def test_a_file_that_fails_says_so_in_one_line(code: str, message: str, tmp_path: Path, digits: DataSet) -> None:
    (tmp_path / "broken.py").write_text(code)
    with pytest.raises(ModelError, match=message) as refused:
        build_model(f"{tmp_path / 'broken.py'}:net", digits)
    assert "\n" not in str(refused.value)
    assert ("failed" in message) == (refused.value.__cause__ is not None)


NEIGHBOURS = """
from __future__ import annotations

from dataclasses import dataclass, field

from beside_it import WIDTH
from torch import nn


@dataclass
class Sizes:
    width: int = WIDTH
    more: list[int] = field(default_factory=list)


def net(num_classes: int) -> nn.Module:
    import also_beside_it

    assert __name__ != "__main__" and also_beside_it.__name__
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, Sizes().width), nn.Linear(8, num_classes))
"""


def test_a_file_is_run_as_python_would(digits: DataSet, tmp_path: Path) -> None:
    (tmp_path / "timm.py").write_text(NEIGHBOURS)  # the name of an installed module
    (tmp_path / "beside_it.py").write_text("WIDTH = 8")
    (tmp_path / "also_beside_it.py").touch()
    assert list(build_model(f"{tmp_path}/timm.py:net", digits).model.children())[-1].out_features == 10
    assert build_model("timm:resnet10t", digits).model.num_classes == 10


def test_a_file_that_fails_leaves_no_module(digits: DataSet, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text("raise RuntimeError('no')")
    with pytest.raises(ModelError, match=r"failed in line 1: RuntimeError: no"):
        build_model(f"{tmp_path}/failing.py:net", digits)
    assert not any(name.endswith("failing") for name in sys.modules)
