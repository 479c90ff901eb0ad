"""Is choosing by input worth something? A trained model beside itself with one option a block for every sample."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fractrain_fx.nn.cost import gated_meter
from fractrain_fx.nn.gates import Controller
from fractrain_fx.training import Trainer

__all__ = ["FixedChoice", "fixed", "fixed_choice", "fixed_options"]


@dataclass(frozen=True)
class FixedChoice:
    """Both evaluations.

    Attributes:
        value: test measure as trained, each sample with its own options.
        cp: what that costs, as a share (0..1) of full precision over the gated ops.
        fixed_value: test measure with one option for all samples in each block.
        fixed_cp: what that costs: no less than ``cp``, where the options reach it.
        options: number of the option that each block was fixed at.
    """

    value: float
    cp: float
    fixed_value: float
    fixed_cp: float
    options: list[int]


def fixed_choice(trainer: Trainer) -> FixedChoice | None:
    """Evaluate both ways; ``None`` if the model has no gates."""
    meter = gated_meter(trainer.model)
    if meter is None:
        return None
    prices = meter.table.sum(-1) / meter.full.sum()
    with _Choices(trainer.model) as seen:
        value = trainer.evaluate().value
    shares = seen.shares(len(meter.blocks), prices.shape[1])
    cp = float((shares * prices).sum())
    options = fixed_options(shares, prices)
    with fixed(trainer.model, options):
        fixed_value = trainer.evaluate().value
    fixed_cp = float(prices[torch.arange(len(options)), options].sum())
    return FixedChoice(value, cp, fixed_value, fixed_cp, options.tolist())


def fixed_options(shares: Float[Tensor, "blocks options"], prices: Float[Tensor, "blocks options"]) -> Tensor:
    """The most frequent option of each block, then dearer ones until they cost as much as the samples' own.

    Each change takes the option that most samples chose for what it adds to the cost.

    Args:
        shares: of the samples that chose each option.
        prices: of each option, as parts of cp.
    """
    target = (shares * prices).sum()
    options = shares.argmax(1)
    rows = torch.arange(len(options))
    while prices[rows, options].sum() < target * (1 - 1e-6):
        added = prices - prices[rows, options].unsqueeze(1)
        worth = torch.where(added > 0, (shares + 1e-6) / added, 0.0)
        if not worth.any():
            break
        best = int(worth.argmax())
        options[best // worth.shape[1]] = best % worth.shape[1]
    return options


class _Choices:
    """Counts the options of every block over the forwards inside."""

    def __init__(self, model: nn.Module) -> None:
        self._controller = _controller(model)
        self._found: list[Tensor] = []

    def __enter__(self) -> _Choices:
        def note(module: nn.Module, args: object, output: tuple[Tensor, object]) -> None:
            self._found.append(output[0].detach().sum(0))

        self._hook = self._controller.register_forward_hook(note)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def shares(self, blocks: int, options: int) -> Float[Tensor, "blocks options"]:
        """Shares of the samples; the controller is called once for each block, in the order of the cost's table."""
        counts = torch.stack(self._found).view(-1, blocks, options).sum(0)
        return counts / counts.sum(1, keepdim=True)


@contextlib.contextmanager
def fixed(model: nn.Module, options: Sequence[int] | Tensor) -> Iterator[None]:
    """Give every sample the same option of each block inside."""
    calls = 0

    def replace(module: nn.Module, args: object, output: tuple[Tensor, object]) -> tuple[Tensor, object]:
        nonlocal calls
        choice = torch.zeros_like(output[0])
        choice[:, int(options[calls % len(options)])] = 1.0
        calls += 1
        return choice, output[1]

    hook = _controller(model).register_forward_hook(replace)
    try:
        yield
    finally:
        hook.remove()


def _controller(model: nn.Module) -> Controller:
    return next(module for module in model.modules() if isinstance(module, Controller))
