"""The modules and parameters that a graph was made for, and their changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fractrain_fx.capture.compare import same_tensor
from fractrain_fx.capture.source import is_within

__all__ = ["ADAPTERS_FIRST", "SHARDED_ELSEWHERE", "Structure", "is_adapter"]

ADAPTERS_FIRST = (
    "put adapters on the model before it is rewritten, fractrainify(get_peft_model(plain, lora_config)), because a "
    "graph has no place for later ones"
)

SHARDED_ELSEWHERE = (
    "the model's parameters are sharded, and nothing gathers them: torch's fully_shard, and plugins that use it "
    "(accelerate, fsdp= of Hugging Face's Trainer), gather the weights of a layer when the layer is called, and a "
    "rewritten graph does not call layers. Shard the rewritten model with fractrain_fx.distributed.fully_shard(model) "
    "instead, before accelerator.prepare or Trainer"
)


_INSERTED = "frac"  # the name under which a recording puts its own modules


class Structure:
    """Modules by path and identity, parameters and saved buffers by name and shape, and groups of tied names.

    Tensors are not compared by identity: a move, a cast, an assigned checkpoint and FSDP replace them under the same
    names. ``called`` has paths of modules that the graph calls; it has the code of their parents.
    """

    def __init__(self, original: nn.Module, graph_module: nn.Module, called: frozenset[str]) -> None:
        self._views = (original, graph_module)
        self._called = called
        self._modules = _modules(original)
        self._held = {name: module for name, module in original._modules.items()}
        self.adopt_tensors()

    def adopt_tensors(self) -> None:
        """Take the present parameters and buffers for those of the graph."""
        self._shapes = {name: _shape(x) for name, x in _tensors(self._modules)}
        self._ties = _ties(self._modules)
        self._empty = list(self.tensorless())

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Every module by path, the model itself first, under ``""``."""
        return self._modules

    def children(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """For each child its parent's dictionary, its name there, and the child (or ``None``)."""
        graph = self._views[1]
        yield from ((graph._modules, name, child) for name, child in graph._modules.items() if name != _INSERTED)
        for module in self._modules.values():
            yield from ((module._modules, name, child) for name, child in module._modules.items())

    def containers(self) -> Iterator[dict[str, Any]]:
        """The dictionaries of children, of parameters and of buffers. Modules that the graph calls have own buffers."""
        for path, module in self._modules.items():
            yield from (module._modules, module._parameters)
            if not is_within(path, self._called):
                yield module._buffers

    def tensorless(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """For each parameter and buffer that is ``None``: its full name, its module's dictionary, its name there."""
        for path, module in self._modules.items():
            if not is_within(path, self._called):
                for held in (module._parameters, module._buffers):
                    yield from ((_joined(path, name), held, name) for name, x in held.items() if x is None)

    def differences(self) -> list[str]:
        """The differences in words: first modules, then parameters of unchanged modules."""
        changes: dict[str, str] = {}
        stand_ins: set[str] = set()
        for view in self._views:
            now = _modules(view)
            for path, module in self._modules.items():
                if path and now.get(path) is not module and not is_within(path, {*changes, *stand_ins}):
                    if _same_tensors(path, module, now.get(path)) and is_within(path, self._called):
                        stand_ins.add(path)
                    else:
                        changes[path] = _in_words(path, module, now.get(path))
            for path, module in now.items():
                if path not in self._modules and not is_within(path, {*changes, *stand_ins}):
                    changes[path] = f"{path!r} was added: {_short(module)}"
        return [*changes.values(), *self._tensor_differences({*changes, *stand_ins})]

    @property
    def has_new_adapters(self) -> bool:
        """Whether PEFT has put modules into the model since."""
        known = {id(module) for module in self._modules.values()}
        added = (module for view in self._views for module in view.modules() if id(module) not in known)
        return any(is_adapter(module) for module in added)

    def adopt(self) -> None:
        """Give the original the children that were only set in the graph's dictionary, as Trainer's model does."""
        original, graph = self._views
        for name, child in graph._modules.items():
            if name != _INSERTED and child is not self._held.get(name) and name in self._held:
                original._modules[name] = child

    def retie(self) -> None:
        """Tie parameters again that were tied and are equal, because assigning a checkpoint splits them."""
        now = _ties(self._modules)
        for names in self._ties - now:
            owners = [(self._modules[name.rpartition(".")[0]]._parameters, name.rpartition(".")[2]) for name in names]
            tensors = [parameters.get(name) for parameters, name in owners]
            first = tensors[0]
            if first is not None and all(x is not None and same_tensor(first, x) for x in tensors):
                for parameters, name in owners:
                    parameters[name] = first

    def _tensor_differences(self, others: set[str]) -> list[str]:
        tensors = dict(_tensors(self._modules))
        if any(getattr(x, "_fsdp_flattened", False) for x in tensors.values()):
            return []  # the first FSDP replaces all parameters by a flat one
        now = {name: x for name, x in tensors.items() if not is_within(name, others)}
        before = {name: shape for name, shape in self._shapes.items() if not is_within(name, others)}
        changes = []
        for name, shape in before.items():
            if name not in now:
                changes.append(f"{name!r} is gone; pruning and parametrizations replace a parameter by others")
            elif _shape(now[name]) != shape:
                changes.append(f"{name!r} had shape {shape} and has {_shape(now[name])}")
        added = dict.fromkeys(name for name in now if name not in self._shapes)
        filled = (name for name, held, key in self._empty if held.get(key) is not None)
        added |= dict.fromkeys(name for name in filled if not is_within(name, others))
        changes += [f"{name!r} was added" for name in added]
        if not changes and (ties := _ties(self._modules)) != self._ties:
            named = sorted({name for group in ties ^ self._ties for name in group})
            changes.append(f"the ties between {', '.join(map(repr, named))} have changed")
        return changes


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}".lstrip(".")


def is_adapter(module: Any) -> bool:
    """Whether PEFT made a module."""
    return type(module).__module__.startswith("peft.")


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by path, without those that were inserted and those in TorchScript, whose structure is fixed."""
    inserted = f"{_INSERTED}."
    named = model.named_modules(remove_duplicate=False)
    originals = ((path, module) for path, module in named if not f"{path}.".startswith(inserted))
    return {path: module for path, module in originals if not isinstance(module, torch.jit.ScriptModule)}


def _tensors(modules: dict[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and buffers that are in checkpoints."""
    for path, module in modules.items():
        saved = {n: x for n, x in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, x in {**module._parameters, **saved}.items():
            if x is not None:
                yield _joined(path, name), x


def _ties(modules: dict[str, nn.Module]) -> set[frozenset[str]]:
    """Groups of names that are one parameter. Parameters with one storage count as one."""
    groups: dict[Any, set[str]] = defaultdict(set)
    for path, module in modules.items():
        for name, x in module._parameters.items():
            if x is not None:
                groups[_place(x)].add(_joined(path, name))
    return {frozenset(names) for names in groups.values() if len(names) > 1}


def _place(x: Tensor) -> Any:
    try:
        return x.data_ptr() or id(x)
    except Exception:  # tensors without storage, as of some subclasses
        return id(x)


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(getattr(x, "ds_shape", x.shape))  # DeepSpeed's third stage leaves an empty tensor and notes the shape


def _same_tensors(path: str, module: nn.Module, now: nn.Module | None) -> bool:
    """Whether a new module has the tensors of the old one, as a synchronised batch norm does.

    A module that the graph calls may also swap its own parts, as BigBird does by the length of its input.
    """
    if now is None:
        return False
    before = [*module.named_parameters(), *module.named_buffers()]
    after = dict([*now.named_parameters(), *now.named_buffers()])
    return bool(before) and all(after.get(name) is x for name, x in before)


def _in_words(path: str, module: nn.Module, now: nn.Module | None) -> str:
    if now is None:
        return f"{path!r} ({_short(module)}) is gone"
    return f"{path!r} was {_short(module)} and is {_short(now)}"


def _short(module: nn.Module) -> str:
    text = repr(module)
    if is_adapter(module):
        return f"PEFT's {type(module).__name__}"
    return text if "\n" not in text and len(text) < 80 else type(module).__name__
