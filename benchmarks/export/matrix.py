"""``python -m benchmarks.export.matrix --python FRESH``: every model, precision and library, loaded elsewhere.

``FRESH`` is the Python of an environment with torch, transformers, timm and the libraries, but not this package.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.export.models import IMAGES, MODELS, llama
from benchmarks.export.noted import as_noted_in_torchao, as_noted_in_transformers
from benchmarks.export.ties import Cause, cause_in_onnx, cause_in_transformers
from benchmarks.machine import describe, versions
from benchmarks.page import markdown_table, write_section
from fractrain_fx import Engine, FracConfig, FracModel, Pin, Precision, fractrainify
from fractrain_fx.capture.trees import tensors_in
from fractrain_fx.config import RunConfig
from fractrain_fx.errors import FracTrainError

ROOT = Path(__file__).parents[2]
PAGE, RESULTS = ROOT / "docs" / "reference" / "exported.md", ROOT / "docs" / "results" / "export.json"
FORMATS: tuple[Literal["compressed-tensors", "onnx", "torchao"], ...] = ("compressed-tensors", "onnx", "torchao")
_GOAL = 1e-3
_EQUAL = 1e-5  # float32 adds in another order
_CAUSES = {"onnx": cause_in_onnx, "compressed-tensors": cause_in_transformers}
FOUR, EIGHT = Precision(4, 4), Precision(8, 8)
_PLAIN = {"run": RunConfig(backend="plain")}  # other kernels measure ranges that differ in the last bit, and so do ties
_TIES = (
    "values in the middle of two levels take the other one; evaluation that goes on with the codes of the file gives "
    "its outputs"
)
_UNKNOWN = "the cause is not known: neither values in the middle of two levels nor the notes give it"
PRECISIONS: dict[str, dict[str, Any]] = {
    "static 8/8": {"method": "static", "precision": EIGHT},
    "PFQ's last stage": {"method": "pfq"},
    "mixed pins 4/8": {"method": "static", "precision": EIGHT},
    "fp8": {"method": "static", "precision": EIGHT, "format": "fp8"},
    "mxfp8": {"method": "static", "precision": EIGHT, "format": "mx"},
    "mxfp4": {"method": "static", "precision": FOUR, "format": "mx"},
    "nvfp4": {"method": "static", "precision": FOUR, "format": "nvfp4"},
}


@dataclass
class Cell:
    """One model at one precision in one library: the difference of its outputs, or the reason for none.

    Attributes:
        difference: the largest, as a share of the largest output.
        refused: the text of the refusal.
        cause: a :class:`benchmarks.export.ties.Cause`, if the difference is more than the goal and no note has it.
        as_noted: the difference from evaluation with what the notes name, if the difference is more than the goal.
        notes: what the export said.
    """

    model: str
    precision: str
    format: str
    difference: float | None = None
    refused: str | None = None
    cause: dict[str, Any] | None = None
    as_noted: float | None = None
    notes: list[str] = field(default_factory=list)


def made(model: str, precision: str) -> FracModel:
    """A model whose ranges have seen its inputs, at a precision."""
    torch.manual_seed(0)
    original = MODELS[model]()
    settings = (
        _PLAIN | PRECISIONS[precision] | ({} if model in ("ResNet-18", "MobileNetV2") else {"attention": "float"})
    )
    inputs = (torch.randn(4, 3, IMAGES[model], IMAGES[model]),) if model in IMAGES else None
    if inputs is not None:
        original.train()(*inputs)  # batch norms of a new model would change nothing
    if precision.startswith("mixed"):
        rewritten = fractrainify(original, config=FracConfig(**settings), example_inputs=inputs)
        names = [op.name for op in rewritten.ops if op.precision.mode == "scheduled"]
        settings = settings | {"pins": [Pin(name, FOUR) for name in names[::2]]}
        original = rewritten.restore()
    rewritten = fractrainify(original, config=FracConfig(**settings), example_inputs=inputs)
    recording = rewritten._state.recording
    rewritten.calibrate([dict(recording.kwargs) or recording.args[0]])
    if settings["method"] == "pfq":
        rewritten.set_precision(rewritten.frac_config.precision_stages[-1])
    return rewritten.eval()


def jobs_of(model: str, precision: str, folder: Path) -> Iterator[tuple[Cell, dict[str, Any] | None]]:
    """Export one model at one precision to every library."""
    rewritten = made(model, precision)
    recording = rewritten._unlabelled()
    inputs = dict(zip(recording.call.placeholders, recording.inputs, strict=True))
    with torch.no_grad():
        output = rewritten(*recording.args, **recording.kwargs)
    reference = folder / "reference.pt"
    torch.save({"inputs": inputs, "output": next(tensors_in(getattr(output, "logits", output)))}, reference)
    for format in FORMATS:
        cell, target = Cell(model, precision, format), folder / format
        try:
            batches = [dict(recording.kwargs)] if recording.kwargs and precision == "nvfp4" else None
            options: dict[str, Any] = {"batches": batches} if batches and format == "compressed-tensors" else {}
            cell.notes = list(rewritten.export(target, format=format, **options).notes)
        except FracTrainError as error:
            cell.refused = str(error)
            yield cell, None
            continue
        job = {"format": format, "folder": str(target), "reference": str(reference), "model": model}
        yield cell, job | {"keywords": bool(recording.kwargs)}


def generation(folder: Path) -> tuple[dict[str, Any], list[int]]:
    """A tiny LLaMA, trained with PFQ and written; the job that loads it, and the tokens of ``deployed()``."""
    torch.manual_seed(0)
    model = fractrainify(llama(), config=FracConfig(method="pfq", attention="float"))
    engine, optimizer = Engine(model, epochs=4), torch.optim.AdamW(model.parameters(), 3e-3)
    text = torch.arange(64).remainder(17).repeat(8, 1)
    for _ in range(4):
        for start in range(8):
            ids = text[:, start : start + 32]
            loss = engine.loss(model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.end_epoch()
    model.eval().export(folder, format="compressed-tensors", stage=-1)
    plain: Any = model.deployed(-1)
    prompt = text[0, :8].tolist()
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = plain.generate(torch.tensor([prompt]), max_new_tokens=24, **settings)[0].tolist()
    inputs = {"input_ids": text[:2, :16]}
    with torch.no_grad():
        torch.save({"inputs": inputs, "output": plain(**inputs).logits}, folder / "reference.pt")
    job = {"format": "compressed-tensors", "folder": str(folder), "reference": str(folder / "reference.pt")}
    return job | {"model": "LLaMA", "keywords": True, "prompt": prompt}, tokens


def explained(cell: Cell) -> Cell:
    """A cell with the cause of its difference, if that is more than the goal: moved codes, or what its notes name."""
    if cell.difference is None or cell.difference <= _GOAL:
        return cell
    model = made(cell.model, cell.precision)
    if cell.notes:
        as_noted = as_noted_in_torchao if cell.format == "torchao" else as_noted_in_transformers
        cell = replace(cell, as_noted=as_noted(model))
    else:
        cell = replace(cell, cause=asdict(_CAUSES[cell.format](model)))
    print(cell, flush=True)
    return cell


def table(cells: list[Cell]) -> str:
    """The matrix as a table: differences, or refusals by number, which are listed below."""
    reasons: dict[str, str] = {}
    rows = []
    for model in MODELS:
        for precision in PRECISIONS:
            row = [model, precision]
            for format in FORMATS:
                cell = next(c for c in cells if (c.model, c.precision, c.format) == (model, precision, format))
                if cell.refused is None:
                    notes = [*cell.notes, *_reason(cell)]
                    marks = [reasons.setdefault(note, f"{len(reasons) + 1}") for note in notes]
                    row.append(f"{cell.difference:.1g}" + (f" ({', '.join(marks)})" if marks else ""))
                else:
                    row.append(f"refused ({reasons.setdefault(_general(cell.refused), f'{len(reasons) + 1}')})")
            rows.append(row)
    legend = [f"{number}. {reason}" for reason, number in reasons.items()]
    return markdown_table(("model", "precision", *FORMATS), rows, 2) + "\n\n" + "\n".join(legend)


def _reason(cell: Cell) -> Iterator[str]:
    if cell.cause is not None:
        yield _TIES if Cause(**cell.cause).explains else _UNKNOWN
    if cell.as_noted is not None and cell.as_noted > _EQUAL:
        yield _UNKNOWN


def _general(refusal: str) -> str:
    """A refusal without the name of the op that it begins with."""
    first, _, rest = refusal.partition(" ")
    return f"An op {rest}".replace(first, "the op") if "." in first else refusal


def cells_of(place: Path) -> tuple[list[Cell], list[dict[str, Any]]]:
    """All cells, and the jobs of those that were written; what a stopped run has written is not written again."""
    cells, jobs = [], []
    for model in MODELS:
        for precision in PRECISIONS:
            folder = place / f"{model} {precision}".replace("/", "-")
            done = folder / "cells.json"
            if not done.exists():
                folder.mkdir(parents=True, exist_ok=True)
                pairs = [(asdict(cell), job) for cell, job in jobs_of(model, precision, folder)]
                done.write_text(json.dumps(pairs))
            for cell, job in json.loads(done.read_text()):
                cells.append(Cell(**cell))
                jobs += [] if job is None else [job | {"cell": len(cells) - 1}]
            print(model, precision, flush=True)
    return cells, jobs


def main() -> None:
    """Run all cells and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="a Python without this package")
    parser.add_argument("--work", type=Path, help="a folder to go on in, if a run was stopped")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        cells, generated = measured(arguments.work or Path(name), arguments.python)
    print(json.dumps(generated))
    cells = [explained(cell) for cell in cells]
    keep("matrix", cells=[asdict(cell) for cell in cells], generation=generated)
    write_section(PAGE, "matrix", table(cells))


def results() -> dict[str, Any]:
    """The results of earlier runs, by section."""
    sections: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return sections


def keep(section: str, **new: Any) -> None:
    """Write results, and the machine that this section of them was measured on."""
    before = results()
    machine = describe("cpu") | versions("transformers", "compressed-tensors", "onnx", "onnxruntime", "torchao")
    machines = before.get("machines", {}) | {section: machine}
    RESULTS.write_text(json.dumps(before | new | {"machines": machines}, indent=1) + "\n")


def measured(place: Path, python: str) -> tuple[list[Cell], dict[str, Any]]:
    """All cells and the result of generation, loaded with another Python."""
    cells, jobs = cells_of(place)
    generating = place / "generation"
    generating.mkdir(exist_ok=True)
    job, tokens = generation(generating)
    file = place / "jobs.json"
    file.write_text(json.dumps([*jobs, job]))
    loader = Path(__file__).parent / "load.py"
    alone = {"HF_HUB_OFFLINE": "1", "PATH": os.environ["PATH"]}  # without PYTHONPATH
    subprocess.run([python, str(loader), str(file)], check=True, env=alone)
    *done, generated = json.loads(file.read_text())
    if failed := [job for job in (*done, generated) if "failed" in job]:
        raise RuntimeError(f"{len(failed)} files do not load: {failed}")
    for loaded in done:
        cells[loaded["cell"]].difference = loaded["difference"]
    same = generated["tokens"] == tokens
    return cells, {"same_tokens": same, "tokens": len(tokens), "difference": generated["difference"]}


if __name__ == "__main__":
    main()
