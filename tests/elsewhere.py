"""A device without hardware: its tensors say that they lie on another device, and the CPU holds their values.

Code that reads values runs on it, unlike on the meta device, and so does backward, unlike on fake CUDA tensors.
An op that mixes its tensors with those of the CPU is an error, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only

__all__ = ["ELSEWHERE", "Elsewhere", "move", "put_elsewhere"]

# A type of device that torch knows and nothing uses. Autograd runs on it, unlike on CUDA without a driver.
ELSEWHERE = torch.device("lazy")

# The ops that take tensors of two devices on a GPU too, besides pointwise ones with a number of the CPU.
_BETWEEN_DEVICES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}
_INDEXED = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default}


class _Held(Tensor):
    """A tensor elsewhere; ``held`` has its values."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> _Held:
        made: _Held = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=ELSEWHERE,
        )
        made.held = held
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"elsewhere({self.held})"

    def tolist(self) -> Any:
        return self.held.tolist()  # torch refuses it for other classes than its own

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _compute(func, args, kwargs or {})


class Elsewhere(TorchDispatchMode):
    """While it is active, ``device=ELSEWHERE`` makes tensors that lie elsewhere."""

    def __enter__(self) -> Any:
        # Otherwise torch.tensor(..., device=ELSEWHERE) makes a tensor of the device itself, past this mode.
        self._before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(self._before)
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


def put_elsewhere(model: nn.Module) -> None:
    """Move a model's parameters and buffers elsewhere."""
    move(model, lambda x: _Held(x.clone()))


def move(model: nn.Module, moved: Callable[[Tensor], Tensor]) -> None:
    """Replace a model's parameters and buffers by what ``moved`` makes of them; ties stay ties.

    ``nn.Module.to`` would write into the old parameters, which cannot change their class.
    """
    done: dict[Tensor, Tensor] = {}
    for module in model.modules():
        both: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for own in both:
            for name, tensor in own.items():
                if tensor is None:
                    continue
                if tensor not in done:
                    new = moved(tensor.detach())
                    is_parameter = isinstance(tensor, nn.Parameter)
                    done[tensor] = nn.Parameter(new, requires_grad=tensor.requires_grad) if is_parameter else new
                own[name] = done[tensor]


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
    here = [each for each in tensors if not isinstance(each, _Held)]
    device = kwargs.get("device")
    onto = device is not None and torch.device(device).type == ELSEWHERE.type
    if len(here) == len(tensors) and not onto:
        return func(*args, **kwargs)
    if func not in _BETWEEN_DEVICES and len(here) < len(tensors):
        refused = [each for each in here if not _may_mix(func, each)]
        if refused:
            raise RuntimeError(f"{func}: a tensor of shape {tuple(refused[0].shape)} was left on the CPU")
    leaves = device is not None and not onto
    if onto:
        kwargs = kwargs | {"device": "cpu"}
    held_args, held_kwargs = tree_map_only(_Held, lambda each: each.held, (args, kwargs))
    out = func(*held_args, **held_kwargs)
    if leaves:
        return out.clone()  # otherwise a copy to the CPU of what the CPU holds would be the same tensor
    wrapped = tree_map_only(Tensor, _Held, out)
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


def _may_mix(func: Any, x: Tensor) -> bool:
    """Whether an op of a GPU takes a tensor of the CPU: a number among values, or an index."""
    number = x.ndim == 0 and torch.Tag.pointwise in func.tags
    return number or (func in _INDEXED and not x.is_floating_point())
