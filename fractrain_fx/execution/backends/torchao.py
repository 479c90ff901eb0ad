"""A linear layer that torchao computes, forward and backward, on the weight and bias of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fractrain_fx.config import Torchao
from fractrain_fx.errors import ConfigError
from fractrain_fx.execution.autocast import autocast
from fractrain_fx.execution.torchao_devices import refusal
from fractrain_fx.nn.rounding import refuse_create_graph

__all__ = ["MULTIPLES", "NUMERICS", "TorchaoLinear"]

NUMERICS: dict[Torchao, str] = {
    "int8": "torchao int8: symmetric, a scale for each row and column, rounded to the nearest",
    "float8": "torchao float8: e4m3, gradients e5m2, a scale for each tensor, rounded to the nearest",
    "mxfp8": "torchao MXFP8: e4m3, a power of two for every 32, rounded to the nearest; as format mx",
}
"""The numbers in which a layer is computed, with their differences from the simulation."""

MULTIPLES: dict[Torchao, int] = {"float8": 16, "mxfp8": 32}
"""torchao multiplies by a weight only if both of its sizes are multiples of this: those of ``torch._scaled_mm``, and
whole blocks."""

_Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class TorchaoLinear:
    """``x @ weight.T + bias`` as torchao trains it.

    Args:
        kind: int8, float8 or MXFP8.
        inputs, outputs: channels.
        bias: whether there is a bias.

    Raises:
        ConfigError: torchao is not installed, or is too old for this kind.
    """

    def __init__(self, kind: Torchao, inputs: int, outputs: int, bias: bool) -> None:
        self.kind = kind
        self._rows = _rows(kind, _converted(kind, inputs, outputs, bias))

    def __call__(
        self, x: Float[Tensor, "*rows inputs"], weight: Float[Tensor, "outputs inputs"], bias: Tensor | None
    ) -> Float[Tensor, "*rows outputs"]:
        """The layer's output.

        Raises:
            ConfigError: the device cannot run such products, or float8 is asked to multiply float64.
        """
        if not x.numel():
            return F.linear(x, weight, bias)  # torchao would fail: it takes the maximum
        device = x.device.type
        if torch.is_autocast_enabled(device):
            # torchao looks at the autocast of GPUs only. It converts the weight to the activation's type itself.
            dtype = torch.get_autocast_dtype(device)
            x, bias = autocast(x, dtype), autocast(bias, dtype)
        # As one matrix, so that its gradient is one too: torchao views tensors of more dimensions as matrices, which
        # some strides forbid.
        flat = x.reshape(-1, x.shape[-1])
        # Rows of zeros change no scale and no sum. MX sums the weight's gradient over whole blocks of rows. Of a single
        # row, torchao's int8 gradient of the weight is wrong by orders of magnitude on some CPUs with AMX.
        missing = 0
        if self.kind == "mxfp8":
            missing = -len(flat) % MULTIPLES[self.kind]
        elif self.kind == "int8":
            missing = max(0, 2 - len(flat))
        if missing:
            rows = self._rows(F.pad(flat, (0, 0, 0, missing)), weight, bias)[: len(flat)]
        else:
            rows = self._rows(flat, weight, bias)
        if rows.requires_grad and not torch.compiler.is_compiling():
            rows.register_hook(_look_at_mode)
        return rows.reshape(*x.shape[:-1], rows.shape[-1])


def _look_at_mode(_: Tensor) -> None:
    """A hook on a gradient, because the backward of torchao's own Functions is not ours."""
    refuse_create_graph()


def _rows(kind: Torchao, module: nn.Module) -> _Linear:
    """A function that runs a module of torchao on parameters that the module does not hold."""

    def run(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if (reason := refusal(kind, rows.device)) is not None:
            raise ConfigError(f"run.torchao={kind!r} cannot run here: {reason}, or write run.torchao=None")
        if kind in MULTIPLES and rows.dtype == torch.float64:
            raise ConfigError(f"run.torchao={kind!r} cannot multiply float64: write model.float()")
        parameters = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        out: Tensor = functional_call(module, parameters, (rows,))
        return out

    # One call for Dynamo, which cannot trace the configuration that torchao's int8 layer passes to its own Function.
    allowed: _Linear = torch.compiler.allow_in_graph(run)
    return allowed


def _converted(kind: Torchao, inputs: int, outputs: int, bias: bool) -> nn.Module:
    """A layer without values, converted by torchao's public functions."""
    layer: Any = nn.Linear(inputs, outputs, bias=bias, device="meta")
    try:
        if kind == "int8":
            from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
            from torchao.quantization import quantize_

            # By default torchao makes the weight a tensor subclass, with which a CPU silently multiplies in float.
            quantize_(layer, Int8MixedPrecisionTrainingConfig(module_swap=True))
        elif kind == "mxfp8":
            layer = _mxfp8(inputs, outputs, bias)
        else:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            # The weight's gradient is summed over the rows, whose number need not be a multiple of 16.
            layer = convert_to_float8_training(layer, config=Float8LinearConfig(pad_inner_dim=True))
    except ImportError as error:
        raise ConfigError(
            f"run.torchao={kind!r} needs torchao: pip install 'fractrain_fx[torchao]' ({error}), or write "
            "run.torchao=None"
        ) from error
    module: nn.Module = layer
    return module


def _mxfp8(inputs: int, outputs: int, bias: bool, *, emulated: bool = False) -> nn.Module:
    """Torchao's MXFP8 layer, with scales as format ``mx`` has them; ``emulated`` computes it on any device."""
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    kernels = KernelPreference.EMULATED if emulated else KernelPreference.AUTO
    layer: nn.Module = MXFP8Linear(
        inputs,
        outputs,
        bias=bias,
        device="meta",
        kernel_preference=kernels,
        scale_calculation_mode=ScaleCalculationMode.FLOOR,
    )
    return layer
