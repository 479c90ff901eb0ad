"""Run a model and leave no trace: parameters, buffers, flags, attributes and random generators as before.

Attributes of the objects that its modules hold are put back too.
"""

from __future__ import annotations

import contextlib
import random
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fractrain_fx.capture.circumstances.holders import holders, parts_of
from fractrain_fx.capture.compare import copied, same, same_tensor
from fractrain_fx.capture.sizes.standins import files_of
from fractrain_fx.capture.surroundings import Surroundings
from fractrain_fx.capture.trees import CONTAINERS

__all__ = ["LEVELS", "Generators", "Snapshot", "in_mode", "preserved_random_state", "seeded", "set_level", "switch"]


_LARGE = 2**20  # bytes of an array; a larger one is data, which a forward does not write to

LEVELS: Mapping[float, int] = {
    2.0**-20: 0x0C099132,
    0.3: 0x36280C7E,
    0.5: 0x80102204,
    0.7: 0x24F597CD,
    1 - 2.0**-20: 0x1017DB84,
}
"""Numbers that :func:`set_level` makes the generators give: nearly the ends of [0, 1), and between.

Each has the word of state that MT19937 tempers to it (Matsumoto and Nishimura 1998).
"""


class Generators:
    """Python's and numpy's own generators, and those of their kinds that a model or the files of its code hold."""

    def __init__(self, model: nn.Module) -> None:
        kinds = (random.Random, np.random.Generator, np.random.RandomState)
        values = {id(value): value for value in _held_by(model)}.values()
        self.held: tuple[Any, ...] = tuple(value for value in values if isinstance(value, kinds))
        self.of_torch = tuple(value for value in values if isinstance(value, torch.Generator))

    def states(self) -> list[Any]:
        """The states of all generators, to compare."""
        key = np.random.get_state(legacy=False)
        numpy_state = (key["state"]["key"].tobytes(), key["state"]["pos"], key["has_gauss"], key["gauss"])
        return [random.getstate(), numpy_state, *(repr(_state(generator)) for generator in self.held)]

    def keep(self) -> list[Any]:
        """The states of the generators that the model holds, torch's too, to put back."""
        return list(map(_state, (*self.held, *self.of_torch)))

    def put_back(self, states: list[Any]) -> None:
        """Set the generators that the model holds to the states from :meth:`keep`."""
        for generator, state in zip((*self.held, *self.of_torch), states, strict=True):
            if isinstance(generator, np.random.Generator):
                generator.bit_generator.state = state
            else:
                (generator.setstate if isinstance(generator, random.Random) else generator.set_state)(state)


def _held_by(model: nn.Module) -> Iterator[Any]:
    """What a model's modules and objects hold, in containers too, and the variables of the files of its code."""
    for holder, _, _ in holders(model).values():
        for value in list(vars(holder).values()):
            for part in parts_of(value):
                yield part
                if callable(part) and not isinstance(part, (type, nn.Module)):  # such an object is not a holder
                    yield from list(getattr(part, "__dict__", {}).values())
    for file in files_of(model):
        yield from list(vars(file).values())


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_level(level: float) -> None:
    """Let Python's and numpy's own generators give ``level`` at the next few hundred draws, then random numbers.

    Both are Mersenne twisters, which make each output from one word of their state.
    """
    word = LEVELS[level]
    random.setstate((3, (word,) * 624 + (0,), None))
    np.random.set_state(("MT19937", np.full(624, word, np.uint32), 0, 0, 0.0))


class Snapshot:
    """The state of ``model`` at one moment, to return to after each run.

    It holds a copy of every parameter, buffer and other tensor, because a forward may write to all of them (running
    averages of codebooks). With ``held`` only these are copied, and with ``loose`` the other tensors too, for runs that
    are known to write to no others. Gradients are only taken away where there were none. ``surroundings``: how the call
    is made that the model is recorded for. ``on_gpu``: whether a part of the model is on another device than a CPU.
    ``tensors``: parameters, buffers and the other tensors that it holds, by identity. ``changed``: identities of those
    that runs changed.
    """

    def __init__(
        self,
        model: nn.Module,
        surroundings: Surroundings | None = None,
        *,
        held: Iterable[Tensor] | None = None,
        loose: bool = False,
    ) -> None:
        self.model = model
        self.surroundings = surroundings or Surroundings()
        # Containers among the attributes are copied, because a forward may fill them (caches of tables, losses).
        self._attributes = [(holder, dict(vars(holder))) for holder, _, _ in holders(model).values()]
        parts = [part for _, saved in self._attributes for value in saved.values() for part in parts_of(value)]
        self._containers = [(part, part.copy()) for part in parts if isinstance(part, CONTAINERS)]
        arrays = (
            part for part in parts if isinstance(part, (np.ndarray, array, bytearray)) and _nbytes(part) <= _LARGE
        )
        self._arrays = [(part, copied(part)) for part in arrays]
        own = {id(x): x for x in (*model.parameters(), *model.buffers())}
        inner = set(map(id, model.modules()))
        others = {id(x): x for part in parts if id(part) not in inner for x in _tensors_of(part) if id(x) not in own}
        self.tensors = own | others
        held = self.tensors.values() if held is None else [*held, *others.values()] if loose else held
        self._values = [(x, x.detach().clone()) for x in held if not x.is_meta]
        self._versions = {x: x._version for x, _ in self._values if not x.is_inference()}
        self._without_gradient = [p for p in model.parameters() if p.grad is None]
        self.changed: set[int] = set()
        self._hooks = [(p, set(p._backward_hooks or ())) for p in model.parameters()]
        self._plain = {id(x) for x in model.buffers() if not x.requires_grad}
        self.on_gpu = any(x.device.type not in ("cpu", "meta") for x in (*model.parameters(), *model.buffers()))
        self._generators = Generators(model)
        self._drawn = self._generators.keep()

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """Run something inside, then put back the state, and the random generators too."""
        with preserved_random_state():
            try:
                yield
            finally:
                self._restore()

    def _restore(self) -> None:
        for holder, saved in self._attributes:
            attributes = vars(holder)
            for name in attributes.keys() - saved.keys():
                del attributes[name]
            for name, value in saved.items():
                if attributes.get(name) is not value:
                    attributes[name] = value
        for container, contents in self._containers:
            if (container or contents) and not _same_items(container, contents):
                container.clear()
                container.extend(contents) if isinstance(container, (list, deque)) else container.update(contents)
        for part, before in self._arrays:
            if not same(before, part):
                view: Any = part
                view[... if isinstance(part, np.ndarray) else slice(None)] = before
        for module in self.model.modules():
            self._forget_history(module)
        for parameter, before in self._hooks:
            hooks = parameter._backward_hooks or {}
            for key in hooks.keys() - before:
                del hooks[key]
        for parameter in self._without_gradient:
            parameter.grad = None
        self._generators.put_back(self._drawn)
        self.restore_tensors()

    def _forget_history(self, module: nn.Module) -> None:
        """Cut buffers from the gradients that a run left on them."""
        for name, x in module._buffers.items():
            if x is not None and x.requires_grad and id(x) in self._plain:
                # A view cannot be detached in place: another one takes its place.
                module._buffers[name] = x.detach() if x._is_view() else x.detach_().requires_grad_(False)

    def set_mode(self, train: bool) -> None:
        """Switch the model to a mode, by its own ``train``, which may leave parts of it in eval mode.

        In the mode of the call that is recorded, each part has the mode that it had when this object was made. A model
        that has this mode is not switched again, because a ``train`` of its own may do more than set a flag.
        """
        of_call = train is self.surroundings.mode
        if not (of_call and self.model.training is train):
            switch(self.model, training=train)
        if of_call:
            for holder, saved in self._attributes:
                if isinstance(holder, nn.Module) and holder is not self.model:
                    holder.training = saved["training"]

    def restore_tensors(self) -> None:
        """Put back parameters and buffers, and leave attributes as they are now."""
        with torch.no_grad():
            for x, before in self._values:
                if not same_tensor(x, before):
                    self.changed.add(id(x))
                    if (x.shape, x.dtype) == (before.shape, before.dtype):
                        x.copy_(before)
                    else:
                        x.data = before.clone()
        # A backward of the user may wait for these very values.
        torch._C._autograd._unsafe_set_version_counter(tuple(self._versions), tuple(self._versions.values()))


def switch(model: nn.Module, *, training: bool) -> None:
    """Switch a model as users do: a class may define ``eval`` and leave ``train`` as it is."""
    model.train() if training else model.eval()


@contextlib.contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Switch a model to a mode inside, unless it is in that mode; afterwards every part of it has its own again."""
    if model.training is training:
        yield
        return
    modes = [(module, module.training) for module in model.modules()]
    switch(model, training=training)
    try:
        yield
    finally:
        switch(model, training=not training)
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def preserved_random_state() -> Iterator[None]:
    """Put back the generators of Python, numpy and torch on every device in use."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = list(range(len(torch.cuda.default_generators)))
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextlib.contextmanager
def seeded(seed: int = 3_141_592_653) -> Iterator[None]:
    """Start all generators from ``seed`` inside; by default one that a model's own code hardly sets."""
    with preserved_random_state():
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        yield


def _tensors_of(part: Any) -> Iterator[Tensor]:
    """A tensor itself, or those of a module."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, nn.Module):
        yield from (*part.parameters(), *part.buffers())


def _nbytes(value: np.ndarray[Any, Any] | array[Any] | bytearray) -> int:
    return value.nbytes if isinstance(value, np.ndarray) else len(memoryview(value).cast("B"))


def _same_items(value: Any, contents: Any) -> bool:
    """Whether a container holds the same objects as before; ``==`` would compare tensors."""
    if isinstance(value, dict):
        return list(value) == list(contents) and all(value[key] is contents[key] for key in contents)
    if isinstance(value, (list, deque)):
        return len(value) == len(contents) and all(a is b for a, b in zip(value, contents, strict=True))
    return bool(value == contents)
