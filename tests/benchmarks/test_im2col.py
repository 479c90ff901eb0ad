"""The benchmark of 3x3 convolutions as int8 products: what it multiplies, and that it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from benchmarks import im2col


def test_rows_times_the_weight_are_the_convolution() -> None:
    x, w = torch.randn(2, 3, 5, 4), torch.randn(6, 3, 3, 3)
    rows = im2col.columns(x)
    y = rows @ w.movedim(1, -1).flatten(1).t()
    expected = F.conv2d(x, w, padding=1).movedim(1, -1).reshape(-1, 6)
    torch.testing.assert_close(y, expected)


def test_the_command_writes_a_row_for_each_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    im2col.main(["--shapes", "8x4", "16x4", "--batch", "2", "--rounds", "2", "--table", str(page)])
    assert "3x3 convolutions" in capsys.readouterr().out
    text = page.read_text(encoding="utf-8")
    assert "| 8 x 4 | 256 |" in text and "| 16 x 4 | 512 |" in text
    assert "--shapes 8x4 16x4" in text and "--table" not in text
