"""The roofline beside measured and published steps."""

from __future__ import annotations

import pytest

from benchmarks import published, roofline


def test_products_and_steps_are_measured_beside_what_is_computed(capsys: pytest.CaptureFixture[str]) -> None:
    found = roofline.main(["--rounds", "1", "--shapes", "1", "--steps", "1", "--batch", "1"])
    assert [name for name, *_ in found] == ["2048 x 512 x 512", "4 layers of 512"]
    assert all(measured > 0 and computed > 0 for _, measured, computed in found)
    assert "computed, ms" in capsys.readouterr().out


def test_a_published_step_is_computed_within_30_per_cent() -> None:
    step = published.STEPS[0]
    assert published.computed_ms(step) == pytest.approx(step.ms, rel=0.3)
