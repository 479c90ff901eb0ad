"""Parameters of a rewritten model that are sharded over processes: groups by segment, shared buffers, whole weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fractrain_fx.engine.distributed import is_first
from fractrain_fx.errors import ModelError
from fractrain_fx.execution.gathered import ParameterGroup
from fractrain_fx.passes.execute.segments import Segment

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Sharding", "broadcast_over"]


class Sharding:
    """The groups in which the parameters of a model are gathered, in the order in which training calls them.

    All other parameters are with the model itself, which gathers them for the whole call. ``group_of`` has the group of
    each parameter, by the place where the parameter is registered.
    """

    def __init__(
        self, mesh: DeviceMesh, groups: Sequence[ParameterGroup], group_of: Mapping[tuple[int, str], ParameterGroup]
    ) -> None:
        self.mesh, self.groups = mesh, tuple(groups)
        self._group_of = dict(group_of)
        self._called = False

    def note_call(self, *_: Any) -> None:
        """A forward pre-hook of the model: torch's hooks run, which gather what is with the model itself."""
        self._called = True

    def require_call(self) -> None:
        """Check that the model was called, and not its ``forward``, for which nothing would gather its parameters."""
        if not self._called:
            raise ModelError(
                "the forward() of a sharded model was called, so that torch gathers no parameters: call the model "
                "itself, model(...), whose hooks gather them"
            )
        self._called = False

    def groups_of(self, segment: Segment) -> list[ParameterGroup]:
        """The groups to gather for a segment, in the order of its parameters."""
        groups = (self._group_of.get(place.key) for place in segment.parameters)
        return list(dict.fromkeys(group for group in groups if group is not None))

    def share_buffers(self, buffers: Callable[[], Sequence[Tensor]]) -> None:
        """Give every process the buffers of the first one, as DistributedDataParallel does."""
        if self.mesh.size() > 1:
            broadcast_over(self.mesh, buffers())

    def whole(self, model: nn.Module) -> dict[str, Tensor] | None:
        """The state dict with whole tensors on the CPU, on the first process; a collective. ``None`` on the others.

        Tied parameters are one tensor, as in the state dict of an unsharded model.
        """
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        values: dict[str, Any] = get_model_state_dict(model, options=options)
        if not is_first():
            return None
        for name, value in values.items():
            if value.untyped_storage().nbytes() > value.numel() * value.element_size():
                values[name] = value.clone()  # rows that do not divide evenly are gathered with padding behind them
        first: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            values[name] = values[first.setdefault(id(parameter), name)]
        return values

    def shards_of(self, model: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict with this process's shards in place of whole tensors. Nothing is sent."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        shards = dict(state_dict)
        for name, now in model.state_dict().items():
            new = shards.get(name)
            if isinstance(now, DTensor) and isinstance(new, Tensor) and not isinstance(new, DTensor):
                new = new.to(now.to_local().device)
                shards[name] = distribute_tensor(new, now.device_mesh, now.placements, src_data_rank=None)
        return shards


@torch.no_grad()
def broadcast_over(mesh: DeviceMesh, tensors: Sequence[Tensor]) -> None:
    """Overwrite tensors by those of the first process of a mesh; a collective. One message for each type."""
    by_type: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
    for x in tensors:
        by_type[x.dtype].append(x)
    for same in by_type.values():
        flat = torch.cat([x.reshape(-1) for x in same]).to(mesh.device_type)
        for dimension in range(mesh.ndim):  # along the first dimension, then each row along the second
            dist.broadcast(flat, group=mesh.get_group(dimension), group_src=0)
        parts = torch.split(flat, [x.numel() for x in same])
        for x, part in zip(same, parts, strict=True):
            x.copy_(part.view_as(x))
