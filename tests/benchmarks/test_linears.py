"""The benchmark of linear layers on whole codes: that int8 is what it times, and what it says of sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import linears
from fractrain_fx import FracModel
from fractrain_fx.errors import ConfigError


@pytest.mark.long
def test_the_command_writes_a_row_for_each_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    sizes = ["--widths", "16", "32", "--tokens", "8", "64"]
    linears.main([*sizes, "--precisions", "3/6", "8/16", "--rounds", "2", "--table", str(page)])
    assert "a linear layer, ratios to float" in capsys.readouterr().out
    text = page.read_text(encoding="utf-8")
    assert "| width | tokens | float, ms | simulated 8/8 | int8 3/6 | int8 8/16 |" in text
    assert "| 16 | 8 |" in text and "| 32 | 64 |" in text and "--table" not in text
    assert "int8 3/6 takes less time than float " in text


def test_from_where_on_it_wins() -> None:
    float_s, slow, quick = [1.0, 1.0], [2.0, 2.0], [0.5, 0.5]
    found = {
        (8, 1): {"float": float_s, "int8 8/8": quick},
        (8, 2): {"float": float_s, "int8 8/8": slow},
        (8, 4): {"float": float_s, "int8 8/8": quick},
        (16, 1): {"float": float_s, "int8 8/8": quick},
        (32, 1): {"float": float_s, "int8 8/8": slow},
    }
    (line,) = linears.crossovers(found, "float")
    wins = "from 4 tokens on at width 8, from 1 tokens on at width 16, never at width 32"
    assert line == f"int8 8/8 takes less time than float {wins}."


def test_int8_is_what_is_timed_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[FracModel] = []
    made = linears.rewritten

    def kept(*args: Any) -> FracModel:
        models.append(made(*args))
        return models[-1]

    monkeypatch.setattr(linears, "rewritten", kept)
    for step in linears.steps(8, 4, ["8/8", "3/6"], ["8/8"], False, "cpu").values():
        step()
    assert [list(model.kernels().values()) for model in models] == [["float"], ["int8"], ["int8"]]
    with pytest.raises(ConfigError, match=r"run\.backend='codes-always' changes nothing"):
        linears.steps(8, 4, ["12/12"], [], False, "cpu")
