"""Side effects: tensors that a call changed, random numbers that it drew, and generators and tensors that code sets.

The tensors are parameters, buffers (``self.mean = ...``) and weights of modules.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import Node

from fractrain_fx.capture.recording.arguments import argument
from fractrain_fx.capture.recording.constants import TensorWrite
from fractrain_fx.capture.recording.writer import Obstacle, Writer
from fractrain_fx.capture.sizes.standins import stand_in
from fractrain_fx.capture.sizes.symbolic import plain
from fractrain_fx.capture.source import is_within
from fractrain_fx.capture.state import Generators
from fractrain_fx.capture.targets import function_node
from fractrain_fx.capture.trees import version_of

if TYPE_CHECKING:
    from fractrain_fx.capture.recording.recorder import Recorder

__all__ = ["EffectWatch", "Effects", "Written", "refused", "seed_places"]


_ONCE = "(if only the first call does: call the model once before)"


@dataclass(frozen=True)
class EffectWatch:
    """Tensors with their version counters before a call, and the number of draws of random numbers until then."""

    versions: tuple[tuple[Tensor, int], ...]
    draws: int

    @property
    def tensors(self) -> list[Tensor]:
        """The watched tensors."""
        return [x for x, _ in self.versions]


class Effects:
    """Watches version counters of tensors and the state of torch's random generators, and those that a model holds.

    ``moved`` is called when code between two calls has set a generator.
    """

    def __init__(self, model: nn.Module, moved: Callable[[], None]) -> None:
        self._held = Generators(model).of_torch
        self._moved = moved
        self._random = self._states()
        self._draws = 0

    def watch(self, tensors: Iterable[Tensor]) -> EffectWatch:
        """Note versions and draws before a call."""
        states = self._states()
        if not all(map(torch.equal, self._random, states)):
            self._random = states
            self._moved()
        return EffectWatch(tuple((x, version_of(x)) for x in tensors), self._draws)

    def since(self, watch: EffectWatch) -> tuple[list[Tensor], bool]:
        """Tensors written since the watch began, and whether random numbers were drawn."""
        before = self._random
        self.accept()
        self._draws += not all(map(torch.equal, before, self._random))
        return [x for x, version in watch.versions if version_of(x) != version], self._draws > watch.draws

    def accept(self) -> None:
        """Take the present states of the generators as known."""
        self._random = self._states()

    def _states(self) -> list[Tensor]:
        # There are no CUDA generators before CUDA is initialised.
        generators = (torch.default_generator, *torch.cuda.default_generators, *self._held)
        return [generator.get_state() for generator in generators]


def refused(recorder: Recorder, real: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Stand in for a function that no graph can call again."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not recorder.writer.paused:
            recorder.writer.block(f"it {what}, which a graph would not do again")
        with recorder.pause():
            return real(*args, **kwargs)

    return call


def seed_places(recorder: Recorder) -> list[tuple[Any, str, Any]]:
    """Owner, name and replacement of the functions that set a generator: torch's own one by nodes of the graph."""
    real_seed, real_get, real_set = torch.random.manual_seed, torch.random.get_rng_state, torch.random.set_rng_state

    def written(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return real(*args, **kwargs) if recorder.writer.paused else _write_seed(recorder, real, args, kwargs)

        return call

    refusal = refused(recorder, torch.Generator, "makes a generator of random numbers")
    generator = stand_in(torch.Generator, refusal)
    places: list[tuple[Any, str, Any]] = [(torch, "Generator", generator)]
    for owner in (torch, torch.random):
        for name, real in (("manual_seed", real_seed), ("get_rng_state", real_get), ("set_rng_state", real_set)):
            places.append((owner, name, written(real)))
        places.append((owner, "seed", refused(recorder, torch.random.seed, "seeds torch by chance")))
        places.append((owner, "initial_seed", refused(recorder, torch.random.initial_seed, "reads the seed of torch")))
    with_seed = np.random.default_rng
    without = refused(recorder, with_seed, "makes a generator without a seed")
    places.append((np.random, "default_rng", lambda seed=None: without() if seed is None else with_seed(seed)))
    for owner in (random, np.random):
        places.append((owner, "seed", refused(recorder, owner.seed, f"seeds {owner.__name__}")))
    return places


def _write_seed(recorder: Recorder, real: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Write a call that reads or sets the state of torch's generator."""
    recorder.watch(args, kwargs)
    with recorder.pause():
        result = real(*plain(args), **plain(dict(kwargs)))
    recorder.effects.accept()
    arguments = tuple(argument(recorder.writer, value) for value in (*args, *kwargs.values()))
    node = recorder.writer.create("call_function", function_node(real, real.__name__), arguments, effect=True)
    if isinstance(result, Tensor):
        recorder.writer.bind(result, node)
        recorder.writer.mark_random(node)
    return result


class Written:
    """Writes a node for each buffer, or tensor of a module that stays one node, that code sets, in its order."""

    def __init__(self, model: nn.Module, writer: Writer) -> None:
        self._writer = writer
        self._owners = {id(module): (path, module) for path, module in model.named_modules()}
        self._present = {
            (path, name): x for path, module in self._owners.values() for name, x in module._buffers.items()
        }
        self._set: list[tuple[str, Node]] = []
        self._versions = [(name, p, version_of(p)) for name, p in model.named_parameters()]
        named = (*model.named_parameters(), *model.named_buffers())
        self._forms = [(name, x, _form(x)) for name, x in named]

    def setter(self, real: Callable[..., None]) -> Callable[..., None]:
        """Stand in for ``nn.Module.__setattr__``."""

        def write(module: nn.Module, name: str, value: Any) -> None:
            of_buffer = name in vars(module).get("_buffers", ())
            before = module._buffers[name] if of_buffer else None
            real(module, name, value)
            if self._writer.paused or not isinstance(value, Tensor):
                return
            if of_buffer:
                self._write_buffer(module, name, before, value)
            elif name in vars(module) and id(module) in self._owners:
                self._set.append((self._owners[id(module)][0], self._write(module, name, value)))

        return write

    def finish(self) -> None:
        """Write what was put into the dictionaries of buffers themselves; note the parameters that were changed.

        Only modules that the graph calls read attributes when it runs, such as the weight that is set on an LSTM.
        """
        changed = (name for name, p, version in self._versions if version_of(p) != version)
        self._writer.additions.written.update(changed)
        called = {str(node.target) for node in self._writer.graph.find_nodes(op="call_module")}
        for path, node in reversed(self._set):
            if not is_within(path, called) and not node._erased:
                self._writer.graph.erase_node(node)
        for path, module in self._owners.values():
            for name, value in module._buffers.items() if not is_within(path, called) else ():
                if (path, name) in self._present and value is not None and self._writer.known(value) is not None:
                    self._write_buffer(module, name, self._present[path, name], value)
        for place, x, form in self._forms:
            path, _, name = place.rpartition(".")
            if _form(x) != form and not is_within(path, called):
                self._writer.obstacles.append(Obstacle(path, f"it changes the shape or the type of {name!r} {_ONCE}"))

    def _write_buffer(self, module: nn.Module, name: str, before: Tensor | None, value: Tensor) -> None:
        path, _ = self._owners.get(id(module), (None, None))
        if path is None or value is self._present.get((path, name)):
            return
        self._present[path, name] = value
        if before is None or _form(before) != _form(value):
            change = "makes" if before is None else "changes the shape or the type of"
            self._writer.block(f"it {change} buffer {name!r} {_ONCE}")
        else:
            self._write(module, name, value)

    def _write(self, module: nn.Module, name: str, value: Tensor) -> Node:
        path, _ = self._owners[id(module)]
        target = self._writer.additions.kept("written", (path, name), lambda: TensorWrite(module, path, name))
        return self._writer.create("call_module", target, (self._writer.node_of(value),), effect=True)


def _form(x: Tensor) -> tuple[torch.Size, torch.dtype]:
    """Shape and type of a tensor, of which the recorder is not told: no code of the model reads them."""
    with torch._C.DisableTorchFunction():
        return x.shape, x.dtype
