"""Run a part of the model while the weights that it reads are gathered from all processes (FSDP2)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

__all__ = ["Gathered", "ParameterGroup"]


class ParameterGroup(nn.Module):
    """Parameters that torch's ``fully_shard`` gathers and frees together, around every call of this module.

    Torch finds them through the children of this module. :meth:`let_go` takes the children away afterwards: they are
    modules of the model, which must not get second names.

    Args:
        owners: the modules that hold the parameters.
    """

    def __init__(self, owners: Sequence[nn.Module]) -> None:
        super().__init__()
        self._modules = {str(number): owner for number, owner in enumerate(owners)}

    def let_go(self) -> None:
        """Take the children away."""
        self._modules = {}

    def forward(self, run: Callable[..., Any], *args: Any) -> Any:
        """Call ``run``. Torch's hooks gather the parameters before, and free them behind it."""
        return run(*args)


class Gathered(nn.Module):
    """A part of a running graph that runs while groups of parameters are gathered.

    Args:
        groups: the groups; all processes call them in this order, whatever the part then does with its samples.
        part: the part.
    """

    def __init__(self, groups: Sequence[ParameterGroup], part: nn.Module) -> None:
        super().__init__()
        # In a tuple, which torch does not register as children: both belong to the model.
        self._calls = (tuple(groups), part)

    def forward(self, *args: Any) -> Any:
        """Gather, run the part, free."""
        groups, part = self._calls
        run: Callable[..., Any] = part
        for group in reversed(groups):
            run = functools.partial(group, run)
        return run(*args)
