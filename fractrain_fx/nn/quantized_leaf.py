"""Runs a module with its weights quantized, for modules whose inside could not be recorded."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from jaxtyping import Int
from torch import Tensor, nn
from torch.func import functional_call

from fractrain_fx.formats import Format
from fractrain_fx.nn.quantizers import WeightQuantizer

__all__ = ["QuantizedLeaf"]


class QuantizedLeaf(nn.Module):
    """Call a module with every matrix in it rounded, with one range for each entry of the matrix's first dimension.

    Matrices of complex numbers stay as they are. The module stays registered where the model has it; this one only
    refers to it, so no parameter gets a second name.
    """

    def __init__(self, leaf: nn.Module, fmt: Format) -> None:
        super().__init__()
        # In a tuple, which torch does not register as a child.
        self._leaf = (leaf,)
        self._places = _matrices(leaf)
        self.quantizer = WeightQuantizer(fmt, 0)

    @property
    def leaf(self) -> nn.Module:
        """The module."""
        return self._leaf[0]

    def forward(self, bits: Int[Tensor, ""], *args: Any, **kwargs: Any) -> Any:
        """The module's own output, with its matrices rounded to ``bits``."""
        # Tied weights are handled above. torch would look for ties by name, and would leave rounded tensors in place of
        # the parameters of a module that it finds under two names.
        return functional_call(self.leaf, self.rounded(bits), args, kwargs, tie_weights=False)

    def rounded(self, bits: Int[Tensor, ""]) -> dict[str, Tensor]:
        """The rounded matrices, by the names of their parameters."""
        weights: dict[str, Tensor] = {}
        for names in self._places:
            # Not by ``get_parameter``, which refuses the plain tensors that a caller's ``functional_call`` puts there.
            weights.update(dict.fromkeys(names, self.quantizer(attrgetter(names[0])(self.leaf), bits)))
        return weights


def _matrices(leaf: nn.Module) -> tuple[tuple[str, ...], ...]:
    """For each matrix the names of the parameters that hold it: several if weights are tied.

    A module that is found under two names counts once.
    """
    places: dict[int, list[str]] = {}
    for path, module in leaf.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.ndim >= 2 and parameter.is_floating_point():
                places.setdefault(id(parameter), []).append(f"{path}.{name}" if path else name)
    return tuple(map(tuple, places.values()))
