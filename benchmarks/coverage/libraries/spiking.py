"""Spiking networks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.coverage.libraries.entry import Entry, Module, image

__all__ = ["ENTRIES"]

_functional = Module("spikingjelly.activation_based.functional")
_neurons = Module("spikingjelly.activation_based.neuron")
_snn = Module("snntorch")
_spiking = Module("spikingjelly.activation_based.model.spiking_resnet")
_surrogate = Module("spikingjelly.activation_based.surrogate")

_STEPS = 4


class _Leaky(nn.Module):
    """Three layers of snntorch's neurons over a few time steps, as in its tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 10)])
        self.neurons: Any = nn.ModuleList([_snn.Leaky(beta=0.9) for _ in self.layers])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = [neuron.init_leaky() for neuron in self.neurons]
        potentials = []
        for _ in range(_STEPS):
            spikes = x
            for i, (layer, neuron) in enumerate(zip(self.layers, self.neurons, strict=True)):
                spikes, states[i] = neuron(layer(spikes), states[i])
            potentials.append(states[-1])
        return torch.stack(potentials)


class _Clocked(nn.Module):
    """A spiking network that starts from rest at each call and runs for a few time steps."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _functional.reset_net(self.net)
        total: torch.Tensor = sum(self.net(x) for _ in range(_STEPS))
        return total / _STEPS


ENTRIES = (
    Entry("snntorch", "Leaky", _Leaky, lambda: (torch.randn(2, 32),)),
    Entry(
        "spikingjelly",
        "spiking ResNet-18",
        lambda: _Clocked(
            _spiking.spiking_resnet18(
                num_classes=10, spiking_neuron=_neurons.IFNode, surrogate_function=_surrogate.ATan(), detach_reset=True
            )
        ),
        lambda: (image(3, 32, 32),),
    ),
)
