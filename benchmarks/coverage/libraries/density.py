"""Flows, operators, splines and differential equations: networks for densities and for science."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.coverage.libraries.entry import Entry, Module, image

__all__ = ["ENTRIES"]

_flows = Module("normflows")
_kan = Module("kan")
_gp = Module("gpytorch")
_nets = Module("nflows.nn.nets")
_ode = Module("torchdiffeq")
_operators = Module("neuralop.models")
_transforms = Module("nflows.transforms")


def _autoregressive() -> nn.Module:
    made: nn.Module = _transforms.CompositeTransform(
        [
            part
            for _ in range(2)
            for part in (
                _transforms.ReversePermutation(features=6),
                _transforms.MaskedAffineAutoregressiveTransform(features=6, hidden_features=32, num_blocks=1),
            )
        ]
    )
    return made


def _net(inputs: int, outputs: int) -> nn.Module:
    made: nn.Module = _nets.ResidualNet(inputs, outputs, hidden_features=32, num_blocks=1)
    return made


def _coupling() -> nn.Module:
    made: nn.Module = _transforms.CompositeTransform(
        [
            _transforms.PiecewiseRationalQuadraticCouplingTransform(
                mask=torch.tensor([1, -1] * 3), transform_net_create_fn=_net, tails="linear", tail_bound=3.0, num_bins=4
            ),
            _transforms.LULinear(6),
        ]
    )
    return made


def _real_nvp() -> nn.Module:
    parts: list[Any] = []
    for _ in range(2):
        parts += [_flows.flows.AffineCouplingBlock(_flows.nets.MLP([3, 32, 32, 6], init_zeros=True))]
        parts += [_flows.flows.Permute(6, mode="swap")]
    made: nn.Module = _flows.NormalizingFlow(_flows.distributions.DiagGaussian(6), parts)
    return made


class _Field(nn.Module):
    """The right-hand side of a differential equation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        slope: torch.Tensor = self.net(y)
        return slope


class _Solved(nn.Module):
    """A neural differential equation, solved with torchdiffeq."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.field, self.method = _Field(), method

    def forward(self, y: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        path: torch.Tensor = _ode.odeint(self.field, y, times, method=self.method)
        return path[-1]


class _Kernel(nn.Module):
    """The covariance matrix of gpytorch's kernel on the features of a network."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = _gp.kernels.ScaleKernel(_gp.kernels.RBFKernel())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        matrix: torch.Tensor = self.kernel(x).to_dense()
        return matrix


ENTRIES = (
    Entry("nflows", "masked autoregressive flow", _autoregressive, lambda: (torch.randn(8, 6),)),
    Entry("nflows", "spline coupling flow", _coupling, lambda: (torch.randn(8, 6),)),
    Entry("nflows", "ResidualNet", lambda: _net(6, 12), lambda: (torch.randn(8, 6),)),
    Entry("normflows", "RealNVP", _real_nvp, lambda: (torch.randn(8, 6),)),
    Entry(
        "neuraloperator",
        "FNO",
        lambda: _operators.FNO(n_modes=(8, 8), in_channels=1, out_channels=1, hidden_channels=16, n_layers=2),
        lambda: (image(1, 32, 32),),
    ),
    Entry(
        "neuraloperator",
        "UNO",
        lambda: _operators.UNO(
            in_channels=1,
            out_channels=1,
            hidden_channels=8,
            n_layers=3,
            uno_out_channels=[8, 16, 8],
            uno_n_modes=[[4, 4]] * 3,
            uno_scalings=[[1.0, 1.0], [0.5, 0.5], [2.0, 2.0]],
            horizontal_skips_map={2: 0},
            channel_mlp_skip="linear",
        ),
        lambda: (image(1, 32, 32),),
    ),
    Entry(
        "pykan",
        "KAN",
        lambda: _kan.KAN(width=[4, 5, 5, 2], grid=3, k=3, auto_save=False, save_act=False, symbolic_enabled=False),
        lambda: (torch.rand(16, 4) * 2 - 1,),
    ),
    Entry(
        "torchdiffeq", "neural ODE, rk4", lambda: _Solved("rk4"), lambda: (torch.randn(2, 4), torch.linspace(0, 1, 5))
    ),
    Entry(
        "torchdiffeq",
        "neural ODE, dopri5",
        lambda: _Solved("dopri5"),
        lambda: (torch.randn(2, 4), torch.linspace(0, 1, 3)),
    ),
    Entry(
        "gpytorch",
        "deep kernel",
        lambda: nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2), _Kernel()),
        lambda: (torch.randn(8, 4),),
    ),
)
