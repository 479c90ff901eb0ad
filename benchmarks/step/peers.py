"""Other libraries' fake-quantized training at 8 bits, forward only: none of them quantizes gradients.

Each quantizes the convolutions and linear layers that ``static`` quantizes here, and leaves others in float.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from fractrain_fx import FracConfig, plan

__all__ = ["PEERS", "NotAvailableError", "quantized"]

_Quantize = Callable[[nn.Module, set[str], Tensor], nn.Module]


class NotAvailableError(Exception):
    """A method cannot be measured here; the message says why."""


def quantized(peer: str, model: nn.Module, x: Tensor) -> nn.Module:
    """``model`` prepared by the peer; ``model`` may be changed.

    Raises:
        NotAvailableError: the peer is not installed, or it refuses the model.
    """
    package, quantize = PEERS[peer]
    if importlib.util.find_spec(package) is None:
        raise NotAvailableError(f"{package} is not installed")
    with _quiet():
        try:
            return quantize(model.train(), _layers(model, x), x)
        except NotAvailableError:
            raise
        except Exception as error:
            # Any error of the other library means that it refuses this model.
            raise NotAvailableError(refusal(error)) from error


def refusal(error: Exception) -> str:
    """The error of a peer in short."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first[:120]}"


def _layers(model: nn.Module, x: Tensor) -> set[str]:
    """Paths of the convolutions and linear layers that ``static`` quantizes."""
    modules = dict(model.named_modules())
    ops = plan(model, config=FracConfig(method="static"), example_inputs=(x[:2],)).ops
    scheduled = {op.name for op in ops if op.precision.mode == "scheduled"}
    return {name for name in scheduled if isinstance(modules.get(name), nn.Conv2d | nn.Linear)}


def _brevitas(model: nn.Module, layers: set[str], x: Tensor) -> nn.Module:
    from brevitas import nn as qnn
    from brevitas.graph.quantize import layerwise_quantize
    from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat

    class Activation(Int8ActPerTensorFloat):  # type: ignore[misc]
        # Steps until a scale is a parameter (default 300). Until then every step takes a percentile, at twice the
        # cost.
        collect_stats_steps = 1

    settings = {"input_quant": Activation, "weight_quant": Int8WeightPerChannelFloat}
    layer_map = {nn.Conv2d: (qnn.QuantConv2d, settings), nn.Linear: (qnn.QuantLinear, settings)}
    mapped = {name for name, module in model.named_modules() if type(module) in layer_map}
    others = sorted(mapped - layers)  # a container in this list would exclude all its layers
    replaced: nn.Module = layerwise_quantize(model, compute_layer_map=layer_map, name_blacklist=others)
    _require(replaced, layers, (qnn.QuantConv2d, qnn.QuantLinear))
    return replaced


def _torch_ao_eager(model: nn.Module, layers: set[str], x: Tensor) -> nn.Module:
    from torch.ao import quantization

    for name, module in model.named_modules():
        module.qconfig = quantization.get_default_qat_qconfig("x86") if name in layers else None
    prepared: nn.Module = quantization.prepare_qat(model)
    _require(prepared, layers, (torch.ao.nn.qat.Conv2d, torch.ao.nn.qat.Linear))
    return prepared


def _torch_ao_fx(model: nn.Module, layers: set[str], x: Tensor) -> nn.Module:
    from torch.ao.quantization import QConfigMapping, get_default_qat_qconfig
    from torch.ao.quantization.quantize_fx import prepare_qat_fx

    mapping = QConfigMapping()
    for name in layers:
        mapping = mapping.set_module_name(name, get_default_qat_qconfig("x86"))
    return prepare_qat_fx(model, mapping, (x,))


def _torchao(model: nn.Module, layers: set[str], x: Tensor) -> nn.Module:
    from torchao.quantization import quantize_
    from torchao.quantization.qat import FakeQuantizedLinear, IntxFakeQuantizeConfig, QATConfig

    linear = {name for name in layers if isinstance(model.get_submodule(name), nn.Linear)}
    if not linear:
        raise NotAvailableError("torchao trains linear layers only, and this model has none to quantize")
    config = QATConfig(
        activation_config=IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False),
        weight_config=IntxFakeQuantizeConfig(torch.int8, "per_channel", is_symmetric=True),
        step="prepare",
    )
    quantize_(model, config, filter_fn=lambda module, name: name in linear)
    _require(model, linear, (FakeQuantizedLinear,))
    return model


PEERS: dict[str, tuple[str, _Quantize]] = {
    "brevitas": ("brevitas", _brevitas),
    "torch.ao-eager": ("torch", _torch_ao_eager),
    "torch.ao-fx": ("torch", _torch_ao_fx),
    "torchao": ("torchao", _torchao),
}


def _require(model: nn.Module, layers: set[str], kinds: tuple[type[nn.Module], ...]) -> None:
    """Check that every layer was replaced, because a peer that quantizes nothing would look fast."""
    left = sorted(name for name in layers if not isinstance(model.get_submodule(name), kinds))
    if left:
        raise NotAvailableError(f"{len(left)} of {len(layers)} layers were not replaced, the first is {left[0]}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the deprecation warnings of these libraries on import and use."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
