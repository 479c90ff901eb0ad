"""Circumstances of a call that a model's code asked for while it was recorded.

Python sees the answer, so a recording holds for calls under the same circumstances.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import call
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fractrain_fx.capture.sizes.guards import Place
from fractrain_fx.capture.trees import tensors_in

__all__ = [
    "AUTOCAST",
    "AUTOCAST_TYPE",
    "GRADIENTS",
    "INFERENCE",
    "BufferShape",
    "Circumstance",
    "InputFact",
    "PartMode",
    "Read",
    "ReadCircumstance",
    "RequiresGrad",
    "Setting",
    "settings_now",
]

Read = Callable[[Sequence[Any]], Any]
"""Gives the present value of a circumstance, from the values for the inputs of a graph."""

# In C, because every call reads all of them. Names that a version of torch lacks are left out.
_IN_C = (
    *("is_grad_enabled", "is_inference_mode_enabled", "get_default_dtype", "get_num_threads"),
    *("_get_deterministic_algorithms", "_get_float32_matmul_precision", "_get_cublas_allow_tf32"),
    *("_get_cudnn_allow_tf32", "_get_cudnn_benchmark", "_get_cudnn_deterministic"),
    *("_get_flash_sdp_enabled", "_get_mem_efficient_sdp_enabled", "_get_math_sdp_enabled", "_get_cudnn_sdp_enabled"),
    *("is_autocast_cache_enabled", "_get_mkldnn_enabled", "is_anomaly_enabled"),
)
_SETTINGS = tuple(
    read for name in _IN_C if (read := getattr(torch._C, name, None) or getattr(torch, name, None)) is not None
)


def settings_now() -> tuple[Any, ...]:
    """Torch's global settings that code can read: gradient mode, inference mode, autocast, precision, kernels."""
    settings = tuple(map(call, _SETTINGS))
    on_cpu, on_gpu = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    if not (on_cpu or on_gpu):
        return settings
    types = torch.get_autocast_dtype("cpu") if on_cpu else None, torch.get_autocast_dtype("cuda") if on_gpu else None
    return settings + types


class Circumstance(Protocol):
    """Something that a model's code can read, and that is not an argument of the call."""

    def reader(self, model: nn.Module) -> Read:
        """A function that gives the present value for a model."""

    def words(self, value: Any) -> str:
        """The circumstance with a value, in words."""


@dataclass(frozen=True)
class PartMode:
    """Whether the part at ``path`` is in train mode."""

    path: str

    def reader(self, model: nn.Module) -> Read:
        part = model.get_submodule(self.path)
        return lambda _: part.training

    def words(self, value: Any) -> str:
        return f"{self.path!r} in {'train' if value else 'eval'} mode"


_ASK: Mapping[str, Callable[..., Any]] = {
    "gradients": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "autocast": torch.is_autocast_enabled,
    "the type of autocast": torch.get_autocast_dtype,
}


@dataclass(frozen=True)
class Setting:
    """A setting of torch around the call; autocast is one for each type of device, ``""`` for that of the inputs."""

    name: str
    device: str | None = None

    def reader(self, model: nn.Module) -> Read:
        ask, device = _ASK[self.name], self.device
        if device is None:
            return lambda _: ask()
        return lambda values: ask(device or next((x.device.type for x in tensors_in(values)), "cpu"))

    def words(self, value: Any) -> str:
        return f"{self.name} {value}" if not isinstance(value, bool) else f"{self.name} switched {('off', 'on')[value]}"


GRADIENTS, INFERENCE = Setting("gradients"), Setting("inference mode")
AUTOCAST, AUTOCAST_TYPE = list(_ASK)[2:]


@dataclass(frozen=True)
class RequiresGrad:
    """Whether any of these tensors requires a gradient: parameters and buffers by name, inputs by their place."""

    names: tuple[str, ...] = ()
    inputs: tuple[int, ...] = ()

    def reader(self, model: nn.Module) -> Read:
        parts = [(model.get_submodule(path), name) for path, _, name in (full.rpartition(".") for full in self.names)]

        def read(values: Sequence[Any]) -> bool:
            if any(getattr(getattr(part, name, None), "requires_grad", False) for part, name in parts):
                return True
            tensors = list(tensors_in(values)) if self.inputs else []
            return any(x.requires_grad for place in self.inputs for x in tensors[place : place + 1])

        return read

    def words(self, value: Any) -> str:
        named = [repr(name) for name in self.names] + [f"tensor {place + 1} of the inputs" for place in self.inputs]
        words = named[0] if len(named) == 1 else f"any of {len(named)} tensors ({', '.join(named[:2])}, ...)"
        return f"{words} {'requiring' if value else 'not requiring'} a gradient"


@dataclass(frozen=True)
class InputFact:
    """A fact of a tensor among the inputs: a property such as ``is_leaf``, or the answer of ``is_conj()``."""

    place: int
    name: str

    def reader(self, model: nn.Module) -> Read:
        return lambda values: self.of(next((x for i, x in enumerate(tensors_in(values)) if i == self.place), None))

    def of(self, tensor: Tensor | None) -> Any:
        """The fact of a tensor; of a property that is another tensor, that it is there."""
        fact = getattr(tensor, self.name, None)
        value = fact() if callable(fact) else fact
        return "a tensor" if isinstance(value, Tensor) else value

    @property
    def is_of_gradients(self) -> bool:
        """Whether it depends on the gradient mode of the call."""
        return self.name in ("is_leaf", "is_inference", "retains_grad")

    def words(self, value: Any) -> str:
        return f"tensor {self.place + 1} of the inputs with {self.name} {value}"


@dataclass(frozen=True)
class BufferShape:
    """The shape of a buffer, which may be replaced by one of another size."""

    name: str

    def reader(self, model: nn.Module) -> Read:
        path, _, name = self.name.rpartition(".")
        part = model.get_submodule(path)
        return lambda _: None if getattr(part, name, None) is None else tuple(getattr(part, name).shape)

    def words(self, value: Any) -> str:
        return f"buffer {self.name!r} of shape {value}"


@dataclass(frozen=True)
class ReadCircumstance:
    """A circumstance, with its value, that the code of the module at path ``module`` read while it was recorded."""

    circumstance: Circumstance
    value: Any
    module: str
    place: Place

    def __str__(self) -> str:
        return f"{self.circumstance.words(self.value)}, which {self.place} reads"
