"""Is choosing by input worth something? A trained model beside itself with choices that do not depend on the input.

Either every sample gets the same options, or each gets those that another sample chose. The second costs exactly what
the model's own choices cost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from fractrain_fx.nn.cost import gated_meter
from fractrain_fx.nn.gates import Controller
from fractrain_fx.training import Trainer

__all__ = ["FixedChoice", "fixed_choice", "fixed_options", "given"]

_COMMON = 0.1  # share of the samples


@dataclass(frozen=True)
class FixedChoice:
    """The three evaluations.

    Attributes:
        value: test measure as trained, each sample with its own options.
        cp: what that costs, as a share (0..1) of full precision over the gated ops.
        shuffled_value: test measure with each sample's options given to another sample, at the same cost.
        fixed_value: test measure with one option for all samples in each block.
        fixed_cp: what that costs: no less than ``cp``, where the options reach it.
        options: number of the option that each block was fixed at.
    """

    value: float
    cp: float
    shuffled_value: float
    fixed_value: float
    fixed_cp: float
    options: list[int]


def fixed_choice(trainer: Trainer) -> FixedChoice | None:
    """Evaluate in all three ways; ``None`` if the model has no gates."""
    meter = gated_meter(trainer.model)
    if meter is None:
        return None
    prices = meter.table.sum(-1) / meter.full.sum()
    with _seen(trainer.model) as choices:
        value = trainer.evaluate().value
    taken = _by_block(choices, len(meter.blocks))
    shares = F.one_hot(taken, prices.shape[1]).float().mean(1)
    order = torch.randperm(taken.shape[1], generator=torch.Generator().manual_seed(0))
    with given(trainer.model, taken[:, order.to(taken.device)]):
        shuffled_value = trainer.evaluate().value
    options = fixed_options(shares, prices)
    with given(trainer.model, options.unsqueeze(1).expand_as(taken)):
        fixed_value = trainer.evaluate().value
    return FixedChoice(
        value=value,
        cp=float((shares * prices).sum()),
        shuffled_value=shuffled_value,
        fixed_value=fixed_value,
        fixed_cp=float(prices[torch.arange(len(options)), options].sum()),
        options=options.tolist(),
    )


def fixed_options(shares: Float[Tensor, "blocks options"], prices: Float[Tensor, "blocks options"]) -> Tensor:
    """The most frequent option of each block, then dearer ones until they cost as much as the samples' own.

    Each change takes the option that most samples chose for what it adds to the cost. At the end, single blocks get
    cheaper options that many samples chose where the sum still costs as much.

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
    while True:
        saved = prices[rows, options].unsqueeze(1) - prices
        left = prices[rows, options].sum() - saved
        saved = torch.where((left < target * (1 - 1e-6)) | (shares < _COMMON), 0.0, saved)
        best = int(saved.argmax())
        if saved.flatten()[best] <= 0:
            return options
        options[best // saved.shape[1]] = best % saved.shape[1]


@contextlib.contextmanager
def _seen(model: nn.Module) -> Iterator[list[Tensor]]:
    """A list of the options of the samples, by number, that each choice in the forwards inside is added to."""
    choices: list[Tensor] = []

    def note(module: nn.Module, args: object, output: tuple[Tensor, object]) -> None:
        choices.append(output[0].detach().argmax(1))

    with _hooked(model, note):
        yield choices


def _by_block(choices: list[Tensor], blocks: int) -> Int[Tensor, "blocks samples"]:
    """The controller is called once for each block, in the order of the cost's table."""
    return torch.stack([torch.cat(choices[block::blocks]) for block in range(blocks)])


@contextlib.contextmanager
def given(model: nn.Module, options: Int[Tensor, "blocks samples"]) -> Iterator[None]:
    """Give the samples of the forwards inside these options, in order."""
    block = first = 0

    def replace(module: nn.Module, args: object, output: tuple[Tensor, object]) -> tuple[Tensor, object]:
        nonlocal block, first
        own, state = output
        numbers = options[block, first : first + len(own)]
        block += 1
        if block == len(options):
            block, first = 0, first + len(own)
        return F.one_hot(numbers, own.shape[1]).to(own), state

    with _hooked(model, replace):
        yield


@contextlib.contextmanager
def _hooked(model: nn.Module, hook: Callable[..., Any]) -> Iterator[None]:
    """Call a hook after each choice, in eager mode: code that was compiled before calls no new hook."""
    controller = next(module for module in model.modules() if isinstance(module, Controller))
    handle = controller.register_forward_hook(hook)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        handle.remove()
