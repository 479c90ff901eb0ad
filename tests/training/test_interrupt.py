"""An interrupt that Python dropped comes again."""

from __future__ import annotations

import os
import signal

import pytest

from fractrain_fx.cli import exit_code
from fractrain_fx.training.interrupt import Interrupt, raise_interrupt


def test_an_interrupt_raises_at_once_and_one_that_was_lost_raises_later() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Interrupt() as interrupt:
            interrupt.check()
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
            # Caught above, as a finalizer would have: asked for it was all the same.
            with pytest.raises(KeyboardInterrupt):
                interrupt.check()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_of_the_users_own_stays() -> None:
    mine = lambda number, frame: None  # noqa: E731
    before = signal.signal(signal.SIGINT, mine)
    try:
        with Interrupt():
            assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_signal_that_ended_a_run_decides_its_exit_code(number: signal.Signals, code: int) -> None:
    before = signal.signal(number, raise_interrupt)
    try:
        with pytest.raises(KeyboardInterrupt) as stopped, Interrupt():
            os.kill(os.getpid(), number)
        assert exit_code(stopped.value) == code
        assert signal.getsignal(number) is raise_interrupt
    finally:
        signal.signal(number, before)
    assert exit_code(KeyboardInterrupt()) == 130
