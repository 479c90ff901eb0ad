"""A model with nothing but what the engine reads: choices that are leaves, and their cost by the formula."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fractrain_fx.config import CostTargets, FracConfig
from fractrain_fx.config.precision import Precision
from fractrain_fx.errors import InputError
from fractrain_fx.nn.cost import Cost, Forward
from tests.build import paper


class FakeModel(nn.Module):
    """Gated blocks with ``macs_of_block`` MACs each; every sample chooses option ``k``, or each its own of several."""

    def __init__(self, config: FracConfig | None = None, macs_of_block: tuple[int, ...] = (10, 30)) -> None:
        super().__init__()
        self.frac_config = config or paper()
        self.macs_of_block = macs_of_block
        self.macs = sum(macs_of_block)
        self.uncounted = 0
        self.tokens: int | None = None
        self.training_macs = 3 * self.macs
        self.gated_share = 1.0
        self.targets = (config.targets if config and config.targets else CostTargets((1.5, 2.0, 2.5, 3.0))).per_cent
        self.batch = 0
        self.precisions: list[Precision] = []
        self._cost: Cost | None = None

    @property
    def cost(self) -> Cost:
        if self._cost is None:
            raise InputError("call the model on a batch first")
        return self._cost

    @property
    def training_forward(self) -> Forward:
        return Forward(self.cost, self.batch, self.tokens, training=True)

    def count_forward(self) -> Forward:
        return self.training_forward

    def pushes(self) -> list[Tensor]:
        """The gradient of each block's choices."""
        return [choice.grad for choice in self.cost.choice.values() if choice.grad is not None]

    def set_precision(self, precision: Precision) -> None:
        self.precisions.append(precision)

    def set_target(self, target: float) -> None:
        self.followed = target

    def look_for_changes(self) -> None:
        pass

    def forward(self, batch: int, k: int | Tensor = 2) -> None:
        options = self.frac_config.gate_options
        share = torch.tensor([option.mean_share(self.frac_config.gate_weight_bits) for option in options])
        choice: dict[str, Tensor] = {}
        cp = torch.zeros(())
        for index, macs in enumerate(self.macs_of_block):
            one_hot = torch.zeros(batch, len(options))
            one_hot[torch.arange(batch), k] = 1
            choice[f"block{index}"] = one_hot.requires_grad_()
            cp = cp + macs / self.macs * (one_hot * share).sum(1).mean()
        self.batch = batch
        gated = self.frac_config.gated
        cp = cp if gated else torch.tensor(0.0625)
        self._cost = Cost(
            cp=cp,
            cp_total=cp.detach() + 0.1,
            fw=cp.detach() / 4,
            eb=cp.detach() / 4,
            gc=cp.detach() / 2,
            choice=choice if gated else {},
            macs=torch.tensor(float(self.training_macs)),
            steered_macs=torch.tensor(float(self.training_macs)),
        )
