"""A module that could not be seen into, run with its weights quantized."""

from __future__ import annotations

from typing import Any

from jaxtyping import Int
from torch import Tensor, nn
from torch.func import functional_call

from fractrain_fx.formats import Format
from fractrain_fx.nn.quantizers import WeightQuantizer

__all__ = ["QuantizedLeaf"]


class QuantizedLeaf(nn.Module):
    """Call a module with every matrix in it rounded, one range for each row of the first dimension.

    The module stays registered where the model has it; this one only refers to it, so no parameter gets a second name.

    Args:
        leaf: the module.
        fmt: the number format.
    """

    def __init__(self, leaf: nn.Module, fmt: Format) -> None:
        super().__init__()
        # In a tuple, which torch does not register as a child.
        self._leaf = (leaf,)
        self._names = tuple(name for name, parameter in leaf.named_parameters() if parameter.ndim >= 2)
        self.quantizer = WeightQuantizer(fmt, 0)

    def forward(self, bits: Int[Tensor, ""], *args: Any, **kwargs: Any) -> Any:
        """The module's own output, with weights at ``bits``."""
        (leaf,) = self._leaf
        weights = {name: self.quantizer(leaf.get_parameter(name), bits) for name in self._names}
        return functional_call(leaf, weights, args, kwargs)
