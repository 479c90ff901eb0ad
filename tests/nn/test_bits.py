"""The host's copy of the stage's bits follows the buffers, and reads them only if they changed."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fractrain_fx import Precision
from fractrain_fx.nn.bits import StageBits

LOW, HIGH = Precision(4, 6), Precision(8, 8)


def copy_in_place(bits: StageBits) -> None:
    for mine, other in zip(bits.buffers(), StageBits(HIGH).buffers(), strict=True):
        mine.detach().copy_(other)


def load(bits: StageBits) -> None:
    bits.load_state_dict(StageBits(HIGH).state_dict())


def load_by_assignment(bits: StageBits) -> None:
    bits.load_state_dict(StageBits(HIGH).state_dict(), assign=True)


def replace(bits: StageBits) -> None:
    bits.fw, bits.bw = StageBits(HIGH).fw, StageBits(HIGH).bw


def set_stage(bits: StageBits) -> None:
    bits.set(HIGH)


@pytest.mark.parametrize("change", [copy_in_place, load, load_by_assignment, replace, set_stage])
@pytest.mark.parametrize("copied", [False, True])
def test_the_host_knows_what_the_buffers_say(change: Callable[[StageBits], None], copied: bool) -> None:
    bits = copy.deepcopy(StageBits(LOW)) if copied else StageBits(LOW)
    assert bits.known == LOW
    change(bits)
    assert bits.known == HIGH


def test_buffers_that_did_not_change_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    bits, real = StageBits(LOW), Tensor.__int__
    read: list[Tensor] = []

    def noted(x: Tensor) -> int:
        read.append(x)
        return real(x)

    monkeypatch.setattr(Tensor, "__int__", noted)
    bits.set(HIGH)
    assert bits.known == HIGH and not read
    copy_in_place(bits)
    assert (bits.known, bits.known) == (HIGH, HIGH) and len(read) == 2


def test_buffers_without_values_leave_what_was_known() -> None:
    assert StageBits(LOW).to("meta").known == LOW
    with torch.inference_mode():
        made = StageBits(LOW)
    assert made.known == LOW
