"""Float or int8: timed once for each kind of product, fixed by configuration, said in the log."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from fractrain_fx.execution.codes import timing as tuning
from fractrain_fx.execution.codes.timing import Tuner, lacks_products

_CPU = torch.device("cpu")


class _Clock:
    """Time that passes only while a form runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, int8_s: float, float_s: float) -> None:
        self.now, self.runs, self.seconds = 0.0, 0, {True: int8_s, False: float_s}
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def run(self, int8: bool) -> None:
        self.now += self.seconds[int8]
        self.runs += 1


@pytest.mark.parametrize("int8_s, chosen", [(0.25, True), (2.0, False)])
def test_the_quicker_form_is_taken_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, int8_s: float, chosen: bool
) -> None:
    clock, tuner = _Clock(monkeypatch, int8_s, 1.0), Tuner()
    with caplog.at_level(logging.INFO):
        assert [tuner.int8("kind", name, clock.run) for name in ("first", "second")] == [chosen, chosen]
    assert clock.runs == 8  # each form once to warm up, and three times
    assert len(caplog.messages) == 1
    assert f"first: 1e+03 ms in float, {1e3 * int8_s:.3g} ms on int8" in caplog.messages[0]
    assert tuner.int8("other kind", "third", clock.run) == chosen and clock.runs == 16


def test_int8_can_be_had_without_a_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, tuner = _Clock(monkeypatch, 2.0, 1.0), Tuner(always=True)
    assert tuner.int8("kind", "op", clock.run) and not clock.runs


def test_what_cannot_multiply_codes_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tuner = Tuner()
    monkeypatch.setattr(tuning, "kernels", lambda: SimpleNamespace(has_products=lambda: False))
    reasons = [tuner.lacks(_CPU) for _ in range(3)]
    assert len(set(reasons)) == 1 and "AVX2" in str(reasons[0])
    assert caplog.messages == [f"all ops compute in float, with the same numbers: {reasons[0]}"]
    monkeypatch.setattr(tuning, "kernels", lambda: SimpleNamespace(has_products=lambda: True))
    assert lacks_products(_CPU) is None
    assert "type cuda" in str(lacks_products(torch.device("cuda")))
