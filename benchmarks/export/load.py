"""``python benchmarks/export/load.py JOBS.json``: load exported files without fractrain_fx, and compare their outputs.

Run by :mod:`benchmarks.export.matrix` in an environment that need not have this package.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def main() -> None:
    """Add ``difference`` (or ``failed``) to every job of the file."""
    assert importlib.util.find_spec("fractrain_fx") is None or "--here" in sys.argv
    torch.set_num_threads(1)
    path = Path(sys.argv[1])
    jobs = json.loads(path.read_text())
    for job in jobs:
        try:
            _load(job)
        except Exception as error:
            job["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    path.write_text(json.dumps(jobs))


def _load(job: dict[str, Any]) -> None:
    held = torch.load(job["reference"], weights_only=True)
    kind, folder, inputs = job["format"], Path(job["folder"]), held["inputs"]
    with torch.no_grad():
        if kind == "onnx":
            job["difference"] = _difference(held["output"], _onnx(folder, inputs))
            return
        model = _torchao(folder, job["model"]) if kind == "torchao" else _transformers(folder)
        model.eval()
        output = model(**inputs) if job["keywords"] else model(*inputs.values())
        job["difference"] = _difference(held["output"], getattr(output, "logits", output))
        if "prompt" in job:
            job["tokens"] = _tokens(model, job["prompt"])


def _onnx(folder: Path, inputs: dict[str, Tensor]) -> Tensor:
    feed = {name: x.numpy() for name, x in inputs.items()}
    return torch.from_numpy(session_of(folder, {}).run(None, feed)[0])


def session_of(folder: Path, entries: Mapping[str, str]) -> Any:
    """A session of a file of ONNX on one thread, with entries of its configuration."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    return onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])


def round_trips(
    files: Mapping[str, tuple[Path, Mapping[str, str]]], inputs: dict[str, Tensor], rounds: int
) -> dict[str, list[float]]:
    """Seconds of a call of each file in each round, on one thread; the files take turns.

    Args:
        files: by name the folder, and entries of the session's configuration.
        inputs: of the call.
        rounds: after one that is not timed.
    """
    sessions = {name: session_of(folder, entries) for name, (folder, entries) in files.items()}
    feed = {name: x.numpy() for name, x in inputs.items()}
    times: dict[str, list[float]] = {name: [] for name in files}
    for _ in range(rounds + 1):
        for name, session in sessions.items():
            start = time.perf_counter()
            session.run(None, feed)
            times[name].append(time.perf_counter() - start)
    return {name: seconds[1:] for name, seconds in times.items()}


def _transformers(folder: Path) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    return getattr(transformers, config.architectures[0]).from_pretrained(folder)


def _torchao(folder: Path, model: str) -> Any:
    import torchao.prototype.mx_formats
    import torchao.quantization  # noqa: F401  # torch.load takes the classes that are imported

    path = Path(__file__).parent / "models.py"
    spec = importlib.util.spec_from_file_location("exported_models", path)
    assert spec is not None and spec.loader is not None
    models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(models)
    made = models.MODELS[model]()
    made.load_state_dict(torch.load(folder / "model.pt", weights_only=True), assign=True)
    return made


def _tokens(model: Any, prompt: list[int]) -> list[int]:
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens: list[int] = model.generate(torch.tensor([prompt]), max_new_tokens=24, **settings)[0].tolist()
    return tokens


def _difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs.float()).abs().max() / ours.abs().max())


if __name__ == "__main__":
    main()
