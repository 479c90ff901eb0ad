"""ONNX files: onnxruntime computes what evaluation does; what a file cannot hold is refused before any is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, nn

from fractrain_fx import FracModel, Pin, Precision
from fractrain_fx.capture.trees import tensors_in
from fractrain_fx.config import AffineConfig
from fractrain_fx.errors import ExportError
from tests.deployable import Convolutions, difference, llama, rewritten
from tests.models import thinned

onnx = pytest.importorskip("onnx", reason="needs the extra: pip install 'fractrain_fx[export]'")
ort = pytest.importorskip("onnxruntime", reason="needs the extra: pip install 'fractrain_fx[export]'")

IMAGES = (2, 3, 8, 8)
IMAGE = torch.randn(2, 8, 12, 12)
# The libraries add in different orders, so a value between two levels of 8 bits may take one here and the other there.
ONE_STEP = 1e-2


def run(folder: Path, *inputs: Tensor) -> list[Tensor]:
    session = ort.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    found = session.run(None, {name: x.numpy() for name, x in zip(names, inputs, strict=True)})
    return [torch.from_numpy(each) for each in found]


def kinds(folder: Path) -> set[int]:
    graph = onnx.load(folder / "model.onnx").graph
    return {each.data_type for each in graph.initializer}


def sizes(value: Any) -> list[Any]:
    """The sizes of an input or output, by name where they are free."""
    return [each.dim_param or each.dim_value for each in value.type.tensor_type.shape.dim]


@pytest.fixture(scope="module")
def images() -> FracModel:
    return rewritten(Convolutions(), torch.randn(IMAGES))


@torch.no_grad()
def test_it_computes_what_evaluation_does_at_any_batch(images: FracModel, tmp_path: Path) -> None:
    written = images.export(tmp_path)
    x = torch.randn(5, *IMAGES[1:])
    assert difference(images(x), run(tmp_path, x)) < ONE_STEP
    assert written.notes == () and written.files.keys() == {"model.onnx"}
    graph = onnx.load(tmp_path / "model.onnx").graph
    assert [each.name for each in graph.input] == ["x"] and [each.name for each in graph.output] == ["output"]
    assert [sizes(each) for each in (*graph.input, *graph.output)] == [["batch", *IMAGES[1:]], ["batch", 4]]
    assert {"QuantizeLinear", "DequantizeLinear"} <= {node.op_type for node in graph.node}
    assert not any(node.metadata_props for node in graph.node)  # most of a small file


@torch.no_grad()
@pytest.mark.parametrize("levels", thinned(["integer", "exact"], 2))
def test_batch_norms_fold_into_scales_whatever_their_sign(images: FracModel, tmp_path: Path, levels: Any) -> None:
    images.export(tmp_path, fold_batch_norm=True, levels=levels)
    x = torch.randn(3, *IMAGES[1:])
    assert difference(images.deployed(levels=levels)(x), run(tmp_path, x)) < ONE_STEP
    assert "BatchNormalization" not in {node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node}


class _DoublingNorm(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@torch.no_grad()
@pytest.mark.parametrize(("kind", "left"), [(BatchNormAct2d, 0), (_DoublingNorm, 2)])
def test_what_a_batch_norm_does_besides_is_kept(tmp_path: Path, kind: Any, left: int) -> None:
    net = nn.Sequential(
        nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3), kind(8), nn.Conv2d(8, 8, 3), kind(8), nn.Conv2d(8, 8, 3)
    )
    model = rewritten(net, IMAGE)
    model.export(tmp_path, fold_batch_norm=True)
    assert difference(model(IMAGE), run(tmp_path, IMAGE)) < ONE_STEP
    graph = onnx.load(tmp_path / "model.onnx").graph
    assert [node.op_type for node in graph.node].count("BatchNormalization") == left


@pytest.mark.long
@torch.no_grad()
def test_onnxruntime_multiplies_codes_and_prepares_other_weights_once(tmp_path: Path) -> None:
    """The third convolution keeps a float output, and the second has 4 bits."""
    layers = [*[layer for _ in range(3) for layer in (nn.Conv2d(8, 8, 3), nn.ReLU())], nn.Conv2d(8, 8, 3)]
    model = rewritten(
        nn.Sequential(*layers, nn.Softmax(1), nn.Conv2d(8, 8, 1)), IMAGE, pins=[Pin("2", Precision(4, 8))]
    )
    x, outputs, found = torch.randn(3, 8, 12, 12), [], []
    for fold in (False, True):
        model.export(tmp_path, levels="integer", fold_weights=fold)
        outputs += run(tmp_path, x)
        assert onnx.TensorProto.INT4 in kinds(tmp_path)
        options = ort.SessionOptions()
        options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "optimized.onnx"), 3
        ort.InferenceSession(tmp_path / "model.onnx", options, providers=["CPUExecutionProvider"])
        found.append([node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node])
    assert difference(*[[each] for each in outputs]) < 1e-2  # the product of 4 bits rounds its bias to an integer
    assert difference(model.deployed(levels="integer")(x), outputs[1:]) < ONE_STEP
    assert [each.count("QLinearConv") for each in found] == [1, 2]
    assert found[1].count("DequantizeLinear") < found[0].count("DequantizeLinear") and "Cast" not in found[1]


class _Alike(nn.Module):
    """Float outputs of convolutions whose weights have equal scales, which the exporter writes once."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.last = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1)
        self.one, self.other = nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)
        nn.init.zeros_(self.get_parameter("other.bias"))
        self.other.weight.data = -self.one.weight.data

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        return self.last((self.one(x) + self.other(x).sin()).relu())


@torch.no_grad()
def test_weights_of_equal_scales_are_prepared_each(tmp_path: Path) -> None:
    model = rewritten(_Alike(), IMAGE)
    model.export(tmp_path, levels="integer", fold_weights=True)
    assert difference(model.deployed(levels="integer")(IMAGE), run(tmp_path, IMAGE)) < ONE_STEP
    graph = onnx.load(tmp_path / "model.onnx").graph
    assert [node.op_type for node in graph.node].count("Mul") == 2


def test_exact_levels_are_not_written_for_onnxruntime(images: FracModel, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="disable_quant_qdq"):
        images.export(tmp_path / "out", fold_weights=True)


@torch.no_grad()
def test_few_bits_are_stored_in_half_bytes_and_other_widths_are_clamped(tmp_path: Path) -> None:
    model = rewritten(
        Convolutions(), torch.randn(IMAGES), pins=[Pin("conv", Precision(4, 8)), Pin("matmul", Precision(3, 8))]
    )
    model.export(tmp_path)
    x = 3 * torch.randn(4, *IMAGES[1:])  # beyond the ranges that were seen
    assert difference(model(x), run(tmp_path, x)) < ONE_STEP
    assert onnx.TensorProto.INT4 in kinds(tmp_path)


@torch.no_grad()
def test_layers_of_4_and_8_bits_stand_behind_a_clamp(tmp_path: Path) -> None:
    model = rewritten(
        nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.ReLU6())]),
        torch.randn(4, 8),
        pins=[Pin("2", Precision(4, 8))],
    )
    model.export(tmp_path)
    x = torch.randn(4, 8)
    assert difference(model(x), run(tmp_path, x)) < ONE_STEP
    assert {onnx.TensorProto.INT4, onnx.TensorProto.INT8} <= kinds(tmp_path)


@torch.no_grad()
@pytest.mark.parametrize("levels", ["exact", "integer"])
@pytest.mark.parametrize("ranges", thinned(["sample", "row", "head"], 1))
def test_ranges_are_measured_at_each_call(tmp_path: Path, ranges: Any, levels: Any) -> None:
    model = rewritten(
        Convolutions(), torch.randn(IMAGES), affine=AffineConfig(ranges=ranges), precision=Precision(6, 6)
    )
    written = model.export(tmp_path, levels=levels, fold_batch_norm=True, fold_weights=levels == "integer")
    x = torch.randn(5, *IMAGES[1:]) * torch.tensor([0.1, 1, 10, 100, 1000]).view(5, 1, 1, 1)
    plain, found = model.deployed(levels=levels)(x), run(tmp_path, x)[0]
    assert max(difference([one], [other]) for one, other in zip(plain, found, strict=True)) < ONE_STEP
    assert (difference(model(x), plain) < 1e-5) == (levels == "exact") and written.notes == ()
    assert onnx.TensorProto.INT8 in kinds(tmp_path)
    assert "BatchNormalization" not in {node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node}


@pytest.mark.long
@torch.no_grad()
def test_a_language_model_takes_other_batches_and_lengths(tmp_path: Path) -> None:
    model = rewritten(llama())
    model.export(tmp_path)
    ids = torch.randint(0, 32, (3, 9))
    mask = torch.ones_like(ids)
    found = run(tmp_path, ids, mask)
    assert difference(model(input_ids=ids, attention_mask=mask).logits, found[0]) < ONE_STEP
    graph = onnx.load(tmp_path / "model.onnx").graph
    assert [each.name for each in graph.input] == ["input_ids", "attention_mask"]
    assert [each.name for each in graph.output] == ["logits"]
    free = ["batch", "length"]
    assert [sizes(each) for each in (*graph.input, *graph.output)] == [free, free, [*free, 32]]
    inside = {str(size) for each in graph.value_info for size in sizes(each)}
    assert "batch" in inside and not any("s" in size for size in inside)  # the exporter's names are s72, 2*s72, ...


@torch.no_grad()
def test_the_sizes_of_the_examples_can_be_kept(images: FracModel, tmp_path: Path) -> None:
    images.export(tmp_path, dynamic=False)
    assert sizes(onnx.load(tmp_path / "model.onnx").graph.input[0]) == list(IMAGES)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"format": "mx"}, "fixed scales"),
        ({"format": "dorefa"}, "dorefa"),
        ({"format": "wageubn"}, "wageubn"),
        ({"precision": Precision(12, 12)}, "12 bits"),
    ],
)
def test_what_a_file_cannot_hold_is_refused_and_nothing_written(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    model = rewritten(nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]), torch.randn(2, 4), **settings)
    with pytest.raises(ExportError, match=words):
        model.export(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unknown_formats_and_options_are_refused(images: FracModel, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="Did you mean 'onnx'"):
        images.export(tmp_path, format="onxx")  # type: ignore[arg-type]
    with pytest.raises(ExportError, match="fold_batch_norm"):
        images.export(tmp_path, fold=True)
    assert list(tensors_in(images.deployed().state_dict()))
