"""Shard a rewritten model over processes with torch's FSDP2, segment by segment."""

from __future__ import annotations

import inspect
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from fractrain_fx.engine.distributed import is_sharded
from fractrain_fx.errors import ConfigError, ModelError, require_known
from fractrain_fx.execution.gathered import ParameterGroup
from fractrain_fx.model import FracModel
from fractrain_fx.model.sharding import Sharding, broadcast_over
from fractrain_fx.passes.execute.segments import Segment
from fractrain_fx.passes.graph.edit import NAMESPACE
from fractrain_fx.passes.graph.state import ParameterPlace

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["fully_shard"]

_GROUPS = "groups"
_CLOSED = (
    "A sharded model is not recorded again, because each process would have to hold all of its weights, and all at the "
    "same call: call the model once on such a batch before fully_shard, in the same mode"
)


def fully_shard(model: FracModel, mesh: DeviceMesh | None = None, **options: Any) -> FracModel:
    """Shard parameters, gradients and optimizer state over processes, in place (torch's FSDP2).

    Each segment of the model gathers its parameters when it runs, in forward and in backward, and frees them behind it.
    Gates, parameters that several segments read (tied weights) and parameters of the model itself are gathered for the
    whole step. Names stay the same; parameters become DTensors. Every process starts from the first one's weights, and
    takes over its running ranges and averages after each training forward, as under DistributedDataParallel.

    Call it before the optimizer is made, and after everything that changes the model: device, type, frozen parameters.

    Args:
        model: a rewritten model.
        mesh: the processes; two dimensions shard along the second and replicate along the first (HSDP). By default all
            processes, on the model's kind of device.
        options: of ``torch.distributed.fsdp.fully_shard``: ``reshard_after_forward`` (of segments), ``mp_policy``,
            ``offload_policy``, ``shard_placement_fn``.

    Returns:
        The model, which has the methods of torch's ``FSDPModule`` too.

    Raises:
        ModelError: the model was not rewritten, or is sharded already, or torch cannot shard a parameter.
        ConfigError: there is no group of processes, or an option is unknown or does not fit the model.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard as shard_module
    from torch.distributed.fsdp import register_fsdp_forward_method

    shard: Any = shard_module  # its overloads do not know keywords that are passed on

    _require_rewritten(model)
    known = inspect.signature(shard).parameters.keys() - {"module", "mesh", "ignored_params"}
    require_known("fully_shard", options, sorted(known))
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            "fully_shard needs a group of processes: start the script with torchrun, and call "
            "torch.distributed.init_process_group() before fully_shard"
        )
    _require_shardable(model)
    _require_type(model, options.get("mp_policy"))
    if mesh is None:
        device = next(chain(model.parameters(), model.buffers())).device
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    state = model._state
    tensors = [x.detach() for x in chain(model.parameters(), model.buffers()) if not x.is_meta]
    if mesh.size() > 1:
        for x in tensors:
            broadcast_over(mesh, [x])
    if any(x.device.type != mesh.device_type for x in tensors):
        state.variants.forget()  # torch moves the tensors of the first recording only
    for costs in chain(*(variant.costs.values() for variant in state.variants)):
        costs.prepare()
    groups: list[ParameterGroup] = []
    group_of: dict[tuple[int, str], ParameterGroup] = {}
    # Torch names the class of a segment that returns a view. No cut lies between a view and an op that changes it.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(FSDPParameterGroup\)")
    for places in _parts(model, state.running[True].segments()):
        parameters = {place.owner._parameters[place.name] for place in places}
        group = ParameterGroup(list({id(place.owner): place.owner for place in places}.values()))
        others = {parameter for parameter in group.parameters() if parameter not in parameters}
        try:
            shard(group, mesh=mesh, ignored_params=others, **_of_segments(options))
        except RuntimeError as error:
            if "floating point" not in str(error):
                raise
            raise ModelError(
                f"torch {torch.__version__} shards no integers, which the packed weights of this model are: install a "
                "newer torch, or call model.restore() and rewrite the model without pack_frozen()"
            ) from error
        group.let_go()
        groups.append(group)
        group_of |= {place.key: group for place in places}
    # torch looks for groups below the model. Under `frac` and without parameters they change no names.
    inserted = model._modules.setdefault(NAMESPACE, nn.Module())
    assert inserted is not None
    inserted.add_module(_GROUPS, nn.ModuleList(groups))
    sharded = {place.owner._parameters[place.name] for places in _places(model).values() for place in places}
    sharded = {parameter for parameter in sharded if parameter is not None and is_sharded(parameter)}
    rest = {name: value for name, value in options.items() if name != "reshard_after_forward"}
    shard(model, mesh=mesh, ignored_params=sharded, **rest)
    register_fsdp_forward_method(model, "calibrate")
    state.variants.closed = _CLOSED
    state.sharding = Sharding(mesh, groups, group_of)
    model.register_forward_pre_hook(state.sharding.note_call)
    model.register_forward_hook(_free_unless_backward_follows)
    return model


def _free_unless_backward_follows(model: Any, *_: Any) -> None:
    """A forward hook: torch frees what is with the model itself in backward only, and evaluation has none."""
    if not torch.is_grad_enabled():
        model.reshard()


def _parts(model: FracModel, segments: Sequence[Segment]) -> Iterator[list[ParameterPlace]]:
    """For each segment the places of the parameters that only it reads, segments without such parameters left out."""
    readers: defaultdict[int, set[int]] = defaultdict(set)
    for number, segment in enumerate(segments):
        for place in segment.parameters:
            readers[id(place.owner._parameters[place.name])].add(number)
        for place in segment.passed_on:
            readers[id(place.owner._parameters[place.name])].add(-1)
    gates = {
        id(p) for name, p in model.named_parameters() if name.startswith(f"{NAMESPACE}.") and p.is_floating_point()
    }
    inserted = gates | {id(p) for name, p in model.named_parameters() if "." not in name}
    parts: defaultdict[int, list[ParameterPlace]] = defaultdict(list)
    for parameter, places in _places(model).items():
        if len(readers[parameter]) == 1 and parameter not in inserted:
            parts[min(readers[parameter])] += places
    return (parts[number] for number in sorted(parts))


def _places(model: nn.Module) -> dict[int, list[ParameterPlace]]:
    """For each parameter, by identity, every place where it is registered."""
    places: defaultdict[int, list[ParameterPlace]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places[id(parameter)].append(ParameterPlace(module, name))
    return places


def _of_segments(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options for a segment: the type of the model's output is not that of what goes on to the next segment."""
    policy = options.get("mp_policy")
    return dict(options) if policy is None else {**options, "mp_policy": replace(policy, output_dtype=None)}


def _require_rewritten(model: Any) -> None:
    if not isinstance(model, FracModel):
        raise ModelError(
            f"fully_shard needs a model made by fractrainify, got {type(model).__name__}: shard the rewritten model "
            "before it is compiled or wrapped (DistributedDataParallel, accelerator.prepare), and other models with "
            "torch.distributed.fsdp.fully_shard"
        )
    if model._state.sharding is not None:
        raise ModelError("the model is sharded already: call fully_shard once")


def _require_shardable(model: FracModel) -> None:
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            raise ModelError(
                f"{name} is sharded already, by torch's own fully_shard or a plugin: leave that out, and call "
                "fractrain_fx.distributed.fully_shard on the rewritten model"
            )
        if not parameter.ndim:
            raise ModelError(
                f"{name} is a single number, which torch's fully_shard cannot split: make it a parameter of shape (1,) "
                "before fractrainify, or train with DistributedDataParallel"
            )


def _require_type(model: FracModel, policy: Any) -> None:
    dtype = getattr(policy, "param_dtype", None)
    recorded = next((variant.recording.types for variant in model._state.variants if variant.recording.types), None)
    if dtype is not None and recorded is not None and set(recorded.values()) != {dtype}:
        raise ConfigError(
            f"mp_policy has param_dtype={dtype}, but the model's code reads the type of its parameters, and the graph "
            f"holds {', '.join(sorted({str(kind) for kind in recorded.values()}))}: leave mp_policy out and use "
            f"torch.autocast, or cast the model before: model.to({dtype})"
        )
