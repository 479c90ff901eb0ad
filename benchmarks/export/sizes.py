"""``python -m benchmarks.export.sizes``: bytes of exported files, and their time in onnxruntime, beside float32's.

The files take turns, so that all of them meet the same load of the machine. The time is the median of the ratios inside
the rounds.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from benchmarks.export.load import round_trips
from benchmarks.export.matrix import PAGE, keep
from benchmarks.export.models import llama
from benchmarks.page import markdown_table, write_section
from fractrain_fx import FracConfig, Precision, fractrainify

_FLOAT = "float32"
_KINDS: tuple[tuple[str, dict[str, Any], dict[str, str]], ...] = (
    ("exact", {}, {}),
    ("exact, folded by the session", {}, {"session.disable_quant_qdq": "1"}),
    ("integer", {"levels": "integer"}, {}),
    ("integer, fold_weights", {"levels": "integer", "fold_weights": True}, {}),
)
"""The files: a name, options of the export, and entries of the session's configuration."""


@dataclass
class Size:
    """One file.

    Attributes:
        model: what was written.
        kind: bits and levels.
        bytes: as a share (0..1) of float32's.
        time: of a call in onnxruntime, as a share of float32's.
    """

    model: str
    kind: str
    bytes: float
    time: float | None = None


def images(
    name: str, build: Callable[[], nn.Module], side: int, place: Path, rounds: int, **settings: Any
) -> list[Size]:
    """The files of a model of images in ONNX."""
    torch.manual_seed(0)
    x, label = torch.randn(1, 3, side, side), f"{name}, {side} pixels"
    float32 = place / "float32"
    float32.mkdir(parents=True)
    written: dict[str, Any] = {"dynamo": True, "external_data": False, "verbose": False, "input_names": ["x"]}
    torch.onnx.export(build().eval(), (x,), float32 / "model.onnx", **written)
    whole = (float32 / "model.onnx").stat().st_size
    files = [Size(label, _FLOAT, 1.0)]
    sessions: dict[str, tuple[Path, dict[str, str]]] = {_FLOAT: (float32, {})}
    for bits in (8, 4):
        config = FracConfig(method="static", precision=Precision(bits, 8), **settings)
        model = fractrainify(build(), config=config, example_inputs=(x.repeat(2, 1, 1, 1),))
        model.calibrate([torch.randn(4, *x.shape[1:])])
        for kind, options, entries in _KINDS:
            kind, folder = f"int{bits} {kind}", place / f"{bits} {' '.join(options) or 'exact'}"
            if not folder.exists():
                model.export(folder, fold_batch_norm=True, **options)
            files.append(Size(label, kind, (folder / "model.onnx").stat().st_size / whole))
            sessions[kind] = folder, entries
    times = round_trips(sessions, {"x": x}, rounds)
    for size in files:
        size.time = statistics.median(a / b for a, b in zip(times[size.kind], times[_FLOAT], strict=True))
    return files


def texts(name: str, sizes: dict[str, int], place: Path) -> list[Size]:
    """The files of a LLaMA in compressed-tensors: the whole, and its linear layers without embeddings and head."""
    files = []
    for bits in (8, 4):
        text = llama(**sizes)
        whole = _bytes(dict(text.named_parameters()))
        ends = _bytes({key: p for key, p in text.named_parameters() if "embed_tokens" in key or "lm_head" in key})
        model = fractrainify(text, config=FracConfig(method="static", precision=Precision(bits, 8), attention="float"))
        model.calibrate([dict(model._state.recording.kwargs)])
        written = model.export(place / f"{name} {bits}", format="compressed-tensors", levels="integer")
        size = written.files["model.safetensors"]
        files.append(Size(name, f"int{bits} integer", size / whole))
        files.append(Size(f"{name}, without embeddings and head", f"int{bits} integer", (size - ends) / (whole - ends)))
    return files


def _bytes(tensors: dict[str, Tensor]) -> int:
    return sum(4 * x.numel() for x in tensors.values())


def size_table(files: list[Size]) -> str:
    """All files as a table."""
    rows = [(s.model, s.kind, f"{s.bytes:.3f}", "" if s.time is None else f"{s.time:.2f}") for s in files]
    return markdown_table(("model", "levels", "bytes", "time in onnxruntime"), rows, 2)


def main() -> None:
    """Measure, and write the results."""
    torch.set_num_threads(1)
    files: list[Size] = []
    resnet: Any = lambda: timm.create_model("resnet18", num_classes=10)  # noqa: E731
    vit: Any = lambda: timm.create_model("vit_tiny_patch16_224", num_classes=10)  # noqa: E731
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        files += images("ResNet-18", resnet, 224, place / "a", 20)
        files += images("ViT-Tiny", vit, 224, place / "b", 20, attention="float")
        shape = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "vocab_size": 1000}
        files += texts("LLaMA of 512", shape | {"num_attention_heads": 8}, place)
        shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "vocab_size": 2048}
        files += texts("LLaMA of 1024", shape | {"num_attention_heads": 16}, place)
    keep("sizes", sizes=[asdict(size) for size in files])
    write_section(PAGE, "sizes", size_table(files))
    print(size_table(files))


if __name__ == "__main__":
    main()
