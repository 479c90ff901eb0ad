"""LayerDrop: every layer runs, and a random number chooses between its input and its output.

Python code that looks at a random number cannot be recorded, so the whole encoder would be one node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from fractrain_fx.capture.replaced import replaced
from fractrain_fx.capture.source import forward_code

__all__ = ["dropped_in_graph"]


class _Droppable(NamedTuple):
    """A stack of layers, and the attribute that holds the rate at which it drops them."""

    path: str
    layers: nn.ModuleList
    holder: Any
    name: str

    @property
    def rate(self) -> float:
        return float(getattr(self.holder, self.name))


@contextlib.contextmanager
def dropped_in_graph(model: nn.Module) -> Iterator[list[str]]:
    """Let the layers of transformers' models be chosen by a tensor instead of by Python code, inside the context.

    The distribution of what a training step computes stays as it was. The random numbers do not, because the dropout of
    a layer that is not used still draws. Gives one note for the user for each stack of layers.
    """
    stacks = [stack for path, module in model.named_modules() for stack in _droppable(path, module) if stack.rate > 0]
    notes = [
        f"{stack.path or 'the model'} drops layers at random ({stack.name}={stack.rate:g}): every layer is computed "
        "and counted, and a random number in the graph chooses between its input and its output"
        for stack in stacks
    ]
    layers = ((layer, stack.rate) for stack in stacks for layer in stack.layers if "forward" not in vars(layer))
    forwards = [(layer, "forward", _drops(layer, layer.forward, rate)) for layer, rate in layers]
    with contextlib.ExitStack() as after, replaced(*forwards):
        for stack in stacks:
            after.callback(setattr, stack.holder, stack.name, stack.rate)
            setattr(stack.holder, stack.name, 0.0)
        yield notes


def _droppable(path: str, module: nn.Module) -> Iterator[_Droppable]:
    code = forward_code(module)
    layers = getattr(module, "layers", None)
    if code is None or not isinstance(layers, nn.ModuleList) or "rand" not in code.co_names:
        return
    for name in code.co_names:
        if name.endswith("layerdrop"):
            holder = module if hasattr(module, name) else getattr(module, "config", None)
            if isinstance(getattr(holder, name, None), float):
                yield _Droppable(path, layers, holder, name)


def _drops(layer: nn.Module, forward: Callable[..., Any], rate: float) -> Callable[..., Any]:
    def run(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(hidden_states, *args, **kwargs)
        if not layer.training:
            return output
        dropped = torch.rand([], device=hidden_states.device) < rate
        if isinstance(output, tuple):
            return (torch.where(dropped, hidden_states, output[0]), *output[1:])
        return torch.where(dropped, hidden_states, output)

    return run
