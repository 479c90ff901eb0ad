"""Check that a training loop trains every part: backward reaches the cost term, the optimizer moves the parameters.

An optimizer's step raises the version that torch counts for each parameter, at any learning rate; a step that a
``GradScaler`` skips does not. Reading versions is cheap and does not wait for the device. Some optimizers write without
raising versions (to ``.data``, or in kernels of their own): if a version stayed, the norm of the values decides.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from fractrain_fx.capture.source import source_line
from fractrain_fx.engine import messages
from fractrain_fx.engine.distributed import local_part
from fractrain_fx.errors import ConfigError, CostTermError
from fractrain_fx.nn.cost import Forward

__all__ = ["LoopWatch"]

_ENOUGH = 2  # optimizer steps before a parameter counts as not moved
_LOOKS = 3  # backward passes in which gradients are looked for
_LONG = 50  # batches before the loop counts as moving nothing
_FIRST = 1000  # batches after each of which versions are read, until there were enough steps


@dataclass
class _Mark:
    """A parameter as it stood when the watch began."""

    name: str
    parameter: nn.Parameter
    version: int
    norm: Tensor | None
    reached: bool = False

    def moved(self) -> bool:
        """Whether the parameter was written to since then; true also if that cannot be known."""
        if self.parameter._version != self.version or self.norm is None:
            return True
        now = _norm(self.parameter)
        return now is None or not torch.equal(now, self.norm)


class LoopWatch:
    """Follows a training loop from its first step until the end of an epoch that was enough to judge it.

    If not ``active``, it checks only that backward reaches the cost term. ``unscaled``: the loss must not be multiplied
    before backward.
    """

    def __init__(self, model: Any, active: bool = True, unscaled: bool = False) -> None:
        self._model = model
        self._unscaled = unscaled
        self._active = active and isinstance(model, nn.Module)
        self._marks: list[_Mark] | None = None
        self._line: str | None = None
        self._handed = self._unpaid = self._paid = 0
        self._batches = self._epochs = self._looks = 0
        self._pulse = self._steps = 0
        self._runs = getattr(model, "gradient_runs", 0)
        self._told: set[str] = set()
        self._counted: weakref.ref[Tensor] | None = None  # no tensor: copies of an engine could not copy it

    def is_evaluation(self, ran: Forward) -> bool:
        """Whether the loss is of a forward in evaluation mode; warns once if gradients flow through it."""
        if not ran.training and torch.is_grad_enabled():
            self._tell_once("evaluation", messages.EVALUATION, stacklevel=4)
        return not ran.training

    def _tell_once(self, about: str, message: str, stacklevel: int) -> None:
        if about not in self._told:
            self._told.add(about)
            warnings.warn(message, stacklevel=stacklevel)

    def batch(self, cp: Tensor) -> None:
        """Call before each loss. Raises or warns once the loop is known to go wrong.

        ``cp`` is of the model's last run; every run has a tensor of its own.
        """
        if not self._active or torch.compiler.is_compiling():
            return
        self._batches += 1
        self._look_for_unread()
        self._look_for_counted(cp)
        if self._marks is None:
            self._line = source_line()
            self._marks = list(_marks(self._model))
            self._pulse = self._versions()
        elif self._steps < _ENOUGH and self._batches <= _FIRST:
            self._count_step()
            if self._steps == _ENOUGH:
                self._judge(final=False)

    def _look_for_unread(self) -> None:
        """Warn once if the model ran more than once since the last loss: only the last run's cost can be read."""
        before, self._runs = self._runs, getattr(self._model, "gradient_runs", 0)
        if self._runs - before > 1:
            self._tell_once("unread", messages.unread(self._runs - before), stacklevel=5)

    def _look_for_counted(self, cp: Tensor) -> None:
        """Warn once if there was a loss for this run already: its samples then count twice."""
        if self._counted is not None and self._counted() is cp:
            self._tell_once("again", messages.AGAIN, stacklevel=5)
        self._counted = weakref.ref(cp)

    def hand_out(self, part: Tensor, *, cost_term: bool, weight: float | None = None, divided: bool = False) -> None:
        """Follow a part of the loss that the loop gets: the cost term, or the task's loss.

        ``weight`` is what the loop said of it: below 1, the loop multiplies the loss by its inverse. ``divided``: the
        loop divides the loss that it gets, to accumulate gradients.
        """
        if not part.requires_grad:
            return
        self._handed += cost_term
        self._unpaid += cost_term
        if cost_term or self._looks < _LOOKS:
            told_share = 1.0 if weight is None else min(1.0, weight)
            part.register_hook(partial(self._reach_term, told_share, divided) if cost_term else self._reach)

    def take_unpaid(self) -> int:
        """The number of cost terms handed out since the last call that backward has not reached."""
        unpaid, self._unpaid = self._unpaid, 0
        return unpaid

    def end_epoch(self) -> None:
        """Judge the loop: backward must have reached a cost term, and the gates must move."""
        if not self._active or self._marks is None:
            return
        self._epochs += 1
        if self._steps < _ENOUGH:
            self._count_step()
        if self._judge(final=True):
            self._active, self._marks = False, None

    def _reach_term(self, told_share: float, divided: bool, gradient: Tensor) -> None:
        self._unpaid -= 1
        if divided and self._active and self._looks < _LOOKS and float(gradient) == 1:
            self._tell_once("undivided", messages.UNDIVIDED, stacklevel=3)
        if self._unscaled and self._active and self._looks < _LOOKS:
            scale = told_share * float(gradient)
            if scale > 1.001:
                raise ConfigError(
                    f"the loss was multiplied by {scale:g} before backward, which changes what gate.gradient='fisher' "
                    "finds, as it squares gradients: train in bfloat16 instead of float16 with a GradScaler, or write "
                    "gate.gradient='straight-through'"
                )
        self._reach(gradient)

    def _reach(self, gradient: Tensor) -> None:
        self._paid += 1
        if self._active and self._looks < _LOOKS:
            self._looks += 1
            Variable._execution_engine.queue_callback(self._look_for_gradients)

    def _look_for_gradients(self) -> None:
        """Note, at the end of a backward, which parameters have a gradient: the loop may soon clear it."""
        for mark in self._marks or ():
            mark.reached |= mark.parameter.grad is not None

    def _versions(self) -> int:
        return sum(mark.parameter._version for mark in self._marks or ())

    def _count_step(self) -> None:
        pulse = self._versions()
        self._steps += pulse != self._pulse
        self._pulse = pulse

    def _judge(self, *, final: bool) -> bool:
        """Raise or warn if something is wrong; returns whether everything could be judged."""
        present = dict(self._model.named_parameters())
        # Parameters that were replaced (sharded, moved by swapping) or frozen since tell nothing.
        marks = [m for m in self._marks or () if present.get(m.name) is m.parameter and m.parameter.requires_grad]
        still = [mark for mark in marks if not mark.moved()]
        if len(still) == len(marks):
            if marks and self._paid and self._epochs > 1 and self._batches >= _LONG:
                warnings.warn(messages.nothing_moves(self._batches), stacklevel=4)
                return True
            return False
        if self._handed and not self._paid:
            raise CostTermError(messages.no_backward(self._handed, self._line))
        if self._steps < _ENOUGH and self._batches < _LONG:
            return False
        gates = [mark for mark in marks if mark.name.startswith("frac.")]
        if gates and all(mark in still for mark in gates):
            if final:
                raise CostTermError(messages.gates_stay(len(gates)))
            warnings.warn(messages.gates_stay(len(gates)) + messages.IF_RARER, stacklevel=4)
        missed = [mark.name for mark in still if mark.reached]
        if final and missed:
            warnings.warn(messages.missed(missed, len(marks)), stacklevel=4)
        return True


def _marks(model: nn.Module) -> Iterator[_Mark]:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.numel() and not parameter.is_meta:
            yield _Mark(name, parameter, parameter._version, _norm(parameter))


@torch.no_grad()
def _norm(parameter: Tensor) -> Tensor | None:
    """The norm of this process's values; ``None`` if there are none, or torch has no norm for their type."""
    local = local_part(parameter)
    if not local.numel():
        return None
    double = torch.float32 if local.device.type == "mps" else torch.float64
    try:
        norm: Tensor = torch.linalg.vector_norm(local, dtype=double)
    except RuntimeError:
        return None
    return norm
