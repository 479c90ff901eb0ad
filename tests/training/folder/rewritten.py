"""Files of a checkpoint with other content and the right sum."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fractrain_fx.training.folder import checkpoint as module


def rewrite(file: Path, change: Callable[[Any], Any]) -> None:
    """Change a file of a checkpoint, whose sum is right again."""
    if file.suffix == ".pt":
        torch.save(change(torch.load(file, weights_only=True)), file)
    else:
        file.write_text(json.dumps(change(json.loads(file.read_text()))))
    if file.name != "sha256.json":
        sums = json.loads((file.parent / "sha256.json").read_text())
        (file.parent / "sha256.json").write_text(json.dumps(sums | {file.name: module._digest(file)}))
