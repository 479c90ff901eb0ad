"""An interrupt that Python cannot lose."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["Interrupt", "raise_interrupt"]


def raise_interrupt(number: int, frame: FrameType | None) -> None:
    """A handler that ends a program by any signal as Ctrl-C does; the exception keeps the signal's number."""
    raise KeyboardInterrupt(number)


class Interrupt:
    """In this context Ctrl-C raises ``KeyboardInterrupt`` at once, and again at the next :meth:`check`.

    Python drops an exception that a signal raises inside a finalizer or a weak reference's callback, and the run would
    continue. Signals that do not raise ``KeyboardInterrupt`` are left alone, and so are all signals outside the main
    thread.
    """

    def __init__(self) -> None:
        self._asked: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) in (signal.default_int_handler, raise_interrupt):
                    self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = number
        raise_interrupt(number, frame)

    def check(self) -> None:
        """Raise ``KeyboardInterrupt`` if one was asked for and lost."""
        if self._asked is not None:
            raise_interrupt(self._asked, None)
