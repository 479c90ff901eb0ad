"""Files for other people's trainers, read back as these read them: torchao 0.18 itself, the others by their rules.

The rules are those of torchtitan 0.3.0 (``filter_fqns``: parts of names; ``fqns`` the same), megatron-core 0.16.1
(``quant_config.py``: the first glob that matches), and TransformerEngine 2 (``autocast(enabled=..., recipe=...)``).
"""

from __future__ import annotations

import runpy
import sys
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from fractrain_fx import cli
from fractrain_fx.config.precision import Precision
from fractrain_fx.errors import ConfigError
from fractrain_fx.numerics.sensitivity import MeasuredOp, Sensitivities, Sensitivity
from fractrain_fx.numerics.trainers import TRAINERS, layer_precisions
from fractrain_fx.passes import Product

BITS = {"fp4": Precision(4, 4), "fp8": Precision(8, 8), "bf16": Precision(16, 16)}
PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def sensitivities(
    layers: int = 2,
    prefix: str = "model.layers.",
    parts: tuple[str, ...] = PARTS,
    kind: str = "linear",
    head: bool = True,
) -> Sensitivities:
    """A LLaMA whose later layers are hurt more, with the products of attention and a head that is not measured."""
    ops, rows = [], []
    for layer, part in product(range(layers), parts):
        name = f"{prefix}{layer}.{part}"
        shape = Product(1, 1, 1, 1, 64, 64)
        ops.append(MeasuredOp(name, kind, name, (1000, 1000, 1000), product=shape))
        harm = (1 + layer) * (1 + parts.index(part)) * 1e-2
        for bits in (4, 8):
            rows += [Sensitivity(name, operand, bits, change=harm * 4.0**-bits) for operand in ("x", "w")]
            rows.append(Sensitivity(name, "g", bits, noise=harm * 4.0**-bits))
        product_name = f"{prefix}{layer}.self_attn.matmul"
        if part == parts[0]:
            ops.append(MeasuredOp(product_name, "matmul", f"{prefix}{layer}.self_attn", (100, 100, 100), weight=False))
            rows += [Sensitivity(product_name, operand, 8, change=1.0, noise=1.0) for operand in "xwg"]  # type: ignore[arg-type]
    if head:
        ops.append(MeasuredOp("lm_head", "linear", "lm_head", (500, 500, 500), fixed=32))
    return Sensitivities(tuple(ops), tuple(rows), 1.0, 4)


def middle(found: Sensitivities, trainer: str) -> Any:
    """Half of the way from low precision everywhere to bf16 everywhere."""
    most = layer_precisions(found, 100.0, trainer)
    assert set(most.layers.values()) == {"bf16"}
    with pytest.raises(ConfigError, match="is below the") as refused:
        layer_precisions(found, 1e-9, trainer)
    least = float(str(refused.value).split("is below the ")[1].split()[0])
    return layer_precisions(found, (least + most.cost) / 2, trainer)


def test_the_layers_that_are_hurt_most_stay_in_bf16_and_the_cost_is_that_of_the_file() -> None:
    found = sensitivities()
    chosen = middle(found, "torchtitan")
    assert chosen.layers["layers.1.feed_forward.w2"] == "bf16" and chosen.layers["layers.0.attention.wo"] == "fp8"
    assert chosen.layers["lm_head"] == "bf16" and "not measured" in chosen.fixed["lm_head"]
    widest = max(found.harm(f"model.layers.{layer}.{part}", BITS["fp8"], 0.2) for layer, part in _low(chosen))
    assert all(found.harm(name, BITS["fp8"], 0.2) >= widest for name in _kept(found, chosen))
    assert chosen.cost == pytest.approx(_cost(found, chosen)) and chosen.cost <= chosen.budget


def _theirs(name: str) -> str:
    names = dict(zip(PARTS, ("qkv_linear.wq", "qkv_linear.wk", "wo", "w1", "w3", "w2"), strict=True))
    head, _, part = name.removeprefix("model.").partition(".self_attn." if "attn" in name else ".mlp.")
    own = names[f"{'self_attn' if 'attn' in name else 'mlp'}.{part}"]
    return f"{head}.{'attention' if 'attn' in name else 'feed_forward'}.{own}"


def _low(chosen: Any) -> list[tuple[int, str]]:
    pairs = product(range(2), PARTS)
    return [(layer, part) for layer, part in pairs if chosen.layers[_theirs(f"model.layers.{layer}.{part}")] == "fp8"]


def _kept(found: Sensitivities, chosen: Any) -> list[str]:
    measured = [op.name for op in found.measured if op.kind == "linear"]
    return [name for name in measured if chosen.layers[_theirs(name)] == "bf16"]


def _cost(found: Sensitivities, chosen: Any) -> float:
    spent = 0.0
    for op in found.ops:
        word = "bf16" if op.kind == "matmul" or op.fixed else chosen.layers[_theirs(op.name)]
        spent += sum(op.cost.spent(BITS[word]))
    return 100 * spent / sum(sum(op.macs) for op in found.ops)


def test_layers_that_a_trainer_multiplies_at_once_have_one_precision() -> None:
    found = sensitivities()
    chosen = middle(found, "megatron")
    assert set(chosen.layers) == {
        "output_layer",
        *(
            f"decoder.layers.{layer}.{part}"
            for layer in (0, 1)
            for part in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
        ),
    }
    free = layer_precisions(found, 100.0, "megatron")
    assert set(free.layers.values()) == {"bf16"} and free.harm == 0
    assert {"fp4", "fp8", "bf16"} >= set(chosen.layers.values()) and len(set(chosen.layers.values())) > 1
    assert chosen.cost <= chosen.budget


def test_torchtitan_converts_the_chosen_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = middle(sensitivities(12), "torchtitan")
    chosen.write(tmp_path / "layers.py")
    fake = ModuleType("torchtitan.components.quantization")
    fake.Float8LinearConverter = SimpleNamespace(Config=lambda **options: options)  # type: ignore[attr-defined]
    for name in ("torchtitan", "torchtitan.components"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    read = runpy.run_path(str(tmp_path / "layers.py"))
    (converter,) = read["QUANTIZATION"]
    for name, word in chosen.layers.items():
        filtered = any(part in name for part in converter["filter_fqns"])
        assert filtered == (word == "bf16") and any(part in name for part in read["FQNS"]) == (word == "fp8")
    assert converter["recipe_name"] == "rowwise"


def test_megatron_finds_the_recipe_of_each_layer(tmp_path: Path) -> None:
    chosen = middle(sensitivities(12), "megatron")
    chosen.write(tmp_path / "precision.yaml")
    read = yaml.safe_load((tmp_path / "precision.yaml").read_text())
    assert all(each["enabled"] and each["type"] == "glob" for each in read["matchers"].values())
    for name, word in chosen.layers.items():
        for path in (name, f"module.{name}"):
            first = next(each for each in read["matchers"].values() if fnmatch(path, each["pattern"]))
            recipe = read["configs"][first["config"]]
            assert recipe["transformer_engine_config_type"] == "TEQuantizationParams" and len(recipe) == 2
            low = recipe["training_recipe"]
            assert low["override_quantized_autocast"] is True
            got = low.get("fp8_quantization_recipe") or low.get("fp4_quantization_recipe") or "bf16"
            assert got == {"fp8": "mxfp8", "fp4": "nvfp4", "bf16": "bf16"}[word]


class _Blocks(nn.Module):
    """Layers with the names of the sensitivities below."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)}) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        block: Any
        for block in self.blocks:
            x = block["b"](block["a"](x).relu())
        return x


def test_torchao_converts_the_chosen_layers(tmp_path: Path) -> None:
    float8 = pytest.importorskip("torchao.float8")
    chosen = middle(sensitivities(3, "blocks.", ("a", "b"), head=False), "torchao")
    chosen.write(tmp_path / "layers.py")
    chooses = runpy.run_path(str(tmp_path / "layers.py"))["module_filter_fn"]
    config = float8.Float8LinearConfig(emulate=True)
    model = float8.convert_to_float8_training(_Blocks(), module_filter_fn=chooses, config=config)
    converted = {name for name, each in model.named_modules() if type(each).__name__ == "Float8Linear"}
    assert converted == set(chosen.having("fp8")) and 0 < len(converted) < 6
    model(torch.randn(4, 64)).sum().backward()


def _noting(ran: dict[int, Any], regions: list[Any]) -> Any:
    """``linear``, which notes the region in which each weight is multiplied."""
    linear = nn.functional.linear

    def noting(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ran[id(weight)] = regions[-1]
        return linear(x, weight, bias)

    return noting


def test_transformer_engine_runs_each_layer_in_its_region(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = middle(sensitivities(3, "blocks.", ("a", "b"), head=False), "transformer-engine")
    chosen.write(tmp_path / "layers.py")
    regions: list[Any] = ["outside"]

    @contextmanager
    def autocast(enabled: bool = True, recipe: Any = None) -> Any:
        regions.append(recipe if enabled else "bf16")
        yield
        regions.pop()

    engine, recipes = ModuleType("transformer_engine.pytorch"), ModuleType("transformer_engine.common.recipe")
    engine.autocast = autocast  # type: ignore[attr-defined]
    recipes.MXFP8BlockScaling, recipes.NVFP4BlockScaling = (lambda: "fp8"), (lambda: "fp4")  # type: ignore[attr-defined]
    package = ModuleType("transformer_engine")
    package.pytorch = engine  # type: ignore[attr-defined]
    for each in (package, ModuleType("transformer_engine.common"), engine, recipes):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    ran: dict[int, Any] = {}
    monkeypatch.setattr(nn.functional, "linear", _noting(ran, regions))
    model = _Blocks()
    use = runpy.run_path(str(tmp_path / "layers.py"))["use_precisions"]
    use(model)
    model(torch.randn(4, 64)).sum().backward()
    assert ran == {id(model.get_parameter(f"{name}.weight")): word for name, word in chosen.layers.items()}
    assert len(set(ran.values())) > 1 and regions == ["outside"]
    with pytest.raises(KeyError, match="has no layers"):
        use(nn.Linear(2, 2))


def test_the_file_says_what_stays_and_why(tmp_path: Path) -> None:
    for trainer in TRAINERS:
        chosen = middle(sensitivities(), trainer)
        chosen.write(tmp_path / "file")
        text = (tmp_path / "file").read_text()
        assert "Measured in format affine" in text and "not measured, because it is float" in text
        assert str(chosen) in text and max(map(len, str(chosen).splitlines())) < 160


def test_the_command_writes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sensitivities().to_json(tmp_path / "net.json")
    flags = ["--budget", "FW-10/BW-10", "--write", "torchao", str(tmp_path / "layers.py")]
    assert cli.main(["sensitivity", str(tmp_path / "net.json"), *flags]) == 0
    assert "torchao: 10 fp8, 3 bf16; costs" in " ".join(capsys.readouterr().out.split())
    assert len(runpy.run_path(str(tmp_path / "layers.py"))["CONVERTED"]) == 10
    assert cli.main(["sensitivity", str(tmp_path / "net.json"), *flags[2:]]) == 2
    assert "add --budget" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("trainer", "layers", "words"),
    [
        ("torchtitan", {"a.w": "bf16", "a.w1": "fp8"}, "'a.w' in FILTER_FQNS would take 'a.w1' along"),
        ("torchtitan", {"a.w": "fp8", "a.w1": "bf16"}, "'a.w' in FQNS would take 'a.w1' along"),
        ("megatron", {"proj": "fp8", "out_proj": "bf16"}, "glob for 'proj' would also take 'out_proj'"),
        ("torchao", {"a": "bf16"}, "every layer stays in bf16 for torchao"),
    ],
)
def test_what_a_file_cannot_say_is_an_error(tmp_path: Path, trainer: str, layers: dict[str, Any], words: str) -> None:
    found = replace(middle(sensitivities(), trainer), layers=layers)
    with pytest.raises(ConfigError, match=words):
        found.write(tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_a_longer_name_comes_before_one_that_it_ends_with(tmp_path: Path) -> None:
    found = replace(middle(sensitivities(), "megatron"), layers={"proj": "fp8", "out_proj": "fp4", "c": "bf16"})
    found.write(tmp_path / "file")
    assert list(yaml.safe_load((tmp_path / "file").read_text())["matchers"])[:2] == ["out_proj", "proj"]


def test_what_cannot_be_chosen_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"'torchoa' is unknown.*torchao"):
        layer_precisions(sensitivities(), 10.0, "torchoa")
    with pytest.raises(ConfigError, match="torchao can convert no layer of this model: not a layer that it converts"):
        layer_precisions(sensitivities(kind="conv", head=False), 10.0, "torchao")
    odd = sensitivities(head=False)
    odd = replace(odd, ops=tuple(replace(op, product=Product(1, 1, 1, 1, 60, 64)) for op in odd.ops))
    with pytest.raises(ConfigError, match="its sizes are not multiples of 16"):
        layer_precisions(odd, 10.0, "torchao")
    narrow = sensitivities()
    with pytest.raises(ConfigError, match="8 bits were not measured"):
        layer_precisions(replace(narrow, rows=tuple(row for row in narrow.rows if row.bits < 8)), 10.0, "torchao")
