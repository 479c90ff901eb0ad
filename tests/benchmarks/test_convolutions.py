"""The benchmark of 3x3 convolutions on codes: what it times, and that it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import convolutions, linears


def test_what_is_called_int8_multiplies_codes() -> None:
    layer, x = torch.nn.Conv2d(4, 4, 3, padding=1), torch.randn(2, 4, 6, 6).relu()
    model = linears.rewritten(layer, x, "8/8", linears.CODES)
    linears.step(model, x, torch.randn(2, 4, 6, 6))()
    assert set(model.kernels().values()) == {"int8"}
    assert list(convolutions.steps(4, 6, 2, ["8/8"], bf16=True)) == ["float", "bf16", "simulated 8/8", "int8 8/8"]


@pytest.mark.long
def test_the_command_writes_a_row_for_each_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    convolutions.main(["--shapes", "8x4", "16x4", "--batch", "2", "--rounds", "2", "--table", str(page)])
    assert "3x3 convolution" in capsys.readouterr().out
    text = page.read_text(encoding="utf-8")
    assert "| 8 x 4 | 256 |" in text and "| 16 x 4 | 512 |" in text
    assert "--shapes 8x4 16x4" in text and "--table" not in text
