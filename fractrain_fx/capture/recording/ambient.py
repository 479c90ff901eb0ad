"""Note what a recorded run reads of its circumstances and of types, and write regions that begin and end in a graph."""

from __future__ import annotations

from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import _enter_autocast
from torch.fx import Node
from torch.nn.attention import SDPBackend

from fractrain_fx.capture.asked import (
    GRADIENTS,
    INFERENCE,
    BufferShape,
    Circumstance,
    InputFact,
    PartMode,
    ReadCircumstance,
    RequiresGrad,
    Setting,
)
from fractrain_fx.capture.inputs.form import Kind, kind_of
from fractrain_fx.capture.recording.regions import REGIONS, enter_attention, enter_gradients
from fractrain_fx.capture.recording.writer import Writer
from fractrain_fx.capture.sizes.guards import place_of
from fractrain_fx.capture.source import by_library, is_within

__all__ = ["GRADIENT_READS", "TYPE_READS", "Ambient", "computed_from"]


GRADIENT_READS = frozenset({"requires_grad", "grad_fn", "is_leaf"})
"""Properties of a tensor that depend on gradients."""

# Methods and properties that tell of a tensor what neither its type, nor its sizes, nor its strides decide.
_INPUT_READS = frozenset({"is_conj", "is_inference", "is_neg", "is_pinned", "is_shared", "retains_grad"})
_INPUT_READS |= {"storage_offset", "_base", "_is_view"}


class Ambient:
    """Notes circumstances while a model is recorded.

    ``types`` has the nodes whose types code read, with the kinds of these types; ``floating`` tells whether code read
    the floating type of a tensor.
    """

    def __init__(self, model: nn.Module, writer: Writer) -> None:
        self._model, self._writer = model, writer
        self._names = {id(x): name for named in (model.named_parameters, model.named_buffers) for name, x in named()}
        self._buffers = {id(x): name for name, x in model.named_buffers()}
        self._noted: dict[tuple[Circumstance, Any, str], ReadCircumstance] = {}
        self._set: set[str] = set()
        self.inputs: tuple[Tensor, ...] = ()
        self.types: list[tuple[Node, Kind]] = []
        self.floating = False
        self._autocasts = 0  # open regions of the model

    def seen(self, called: Iterable[str]) -> tuple[ReadCircumstance, ...]:
        """The circumstances that code of the graph read. Modules that it calls read theirs again at every run."""
        parts = set(called)
        in_graph = (noted for noted in self._noted.values() if not is_within(noted.module, parts))
        return tuple({(noted.circumstance, noted.value): noted for noted in in_graph}.values())

    def read(self, circumstance: Circumstance, value: Any, frame: FrameType) -> None:
        """Note that code read a circumstance."""
        if self._writer.paused:
            return
        if isinstance(circumstance, Setting) and circumstance.device is not None:
            if self._autocasts:
                return
            if circumstance.device == self._writer.home_type:
                circumstance = Setting(circumstance.name, "")
        key = circumstance, value, self._writer.path
        if key not in self._noted:
            self._noted[key] = ReadCircumstance(circumstance, value, self._writer.path, place_of(frame))

    def read_mode(self, path: str, value: bool, frame: FrameType) -> None:
        """Note that code read the mode of a part, unless the forward itself set it before."""
        if path and path not in self._set:
            self.read(PartMode(path), value, frame)

    def set_mode(self, path: str) -> None:
        """Note that the forward sets the mode of a part."""
        if not self._writer.paused:
            self._set.add(path)

    def read_gradient(self, x: Tensor, name: str, frame: FrameType) -> None:
        """Note that code read whether a tensor requires a gradient, or has a history."""
        if self._writer.paused or by_library(frame):
            return
        place = self._place(x)
        if id(x) in self._names:
            if name == "requires_grad":
                self.read(RequiresGrad((self._names[id(x)],)), x.requires_grad, frame)
        elif place is not None:
            self.read(RequiresGrad(inputs=(place,)), x.requires_grad, frame)
            if name != "requires_grad":
                self.read(InputFact(place, "is_leaf"), x.is_leaf, frame)
        elif (node := self._writer.known(x)) is not None:
            self._read_inner(node, x.requires_grad, frame)

    def read_fact(self, name: str, args: tuple[Any, ...], frame: FrameType) -> None:
        """Note it if a call asks for a fact of a tensor: those of the inputs that it comes from decide it."""
        if name not in _INPUT_READS or self._writer.paused or by_library(frame):
            return
        x: Tensor = args[0]
        place, node = self._place(x), self._writer.known(x)
        if name == "is_inference" and place is None:
            self.read(INFERENCE, x.is_inference(), frame)
            return
        for source in (place,) if place is not None else self._sources(node).inputs if node is not None else ():
            fact = InputFact(source, name)
            self.read(fact, fact.of(self.inputs[source]), frame)

    def read_shape(self, x: Tensor, frame: FrameType) -> None:
        """Note that code read the shape of a buffer."""
        name = self._buffers.get(id(x))
        if name is not None and not self._writer.paused and not by_library(frame):
            self.read(BufferShape(name), tuple(x.shape), frame)

    def _place(self, x: Tensor) -> int | None:
        return next((place for place, tensor in enumerate(self.inputs) if tensor is x), None)

    def _read_inner(self, node: Node, value: bool, frame: FrameType) -> None:
        """Note the circumstances that decide whether a tensor of the graph requires a gradient."""
        sources = self._sources(node)
        if value:
            self.read(GRADIENTS, True, frame)
        elif sources.reader(self._model)(self.inputs):
            return  # the model cut it from them
        if sources.names or sources.inputs:
            self.read(sources, value, frame)

    def _sources(self, node: Node) -> RequiresGrad:
        """The parameters and inputs from which a node is computed."""
        made_from = computed_from([node])
        inputs = [place for place, x in enumerate(self.inputs) if self._writer.known(x) in made_from]
        names: dict[str, None] = {}
        for source in made_from:
            target = str(source.target)
            if source.op == "get_attr" and not target.startswith("frac."):
                names[target] = None
            elif source.op == "call_module" and not target.startswith("frac."):
                part = self._model.get_submodule(target)
                names |= dict.fromkeys(f"{target}.{name}" for name, _ in part.named_parameters())
        return RequiresGrad(tuple(names), tuple(inputs))

    def read_types(self, tensors: Iterable[Tensor]) -> None:
        """Note that code read the types of these tensors."""
        for x in tensors:
            dtype, node = x.dtype, self._writer.known(x)
            self.floating |= dtype.is_floating_point
            if node is not None:
                self.types.append((node, kind_of(dtype)))

    def typed_inputs(self) -> frozenset[int]:
        """The numbers of the inputs whose exact type the recorded code may have read, itself or of what it computed.

        A type can only come from inputs of the same kind: embeddings of 32-bit tokens have the type of the weight.
        """
        reached = {kind: computed_from(node for node, other in self.types if other is kind) for _, kind in self.types}
        inputs = ((i, self._writer.known(x), kind_of(x.dtype)) for i, x in enumerate(self.inputs))
        return frozenset(i for i, node, kind in inputs if node in reached.get(kind, ()))

    def enter(self, mode: bool = True) -> Node | None:
        """Write that gradients are on (or off) from here, whatever the mode around the call."""
        if self._writer.paused:
            return None
        return self._writer.create("call_function", enter_gradients, (mode,), effect=True)

    def enter_region(self, region: Any) -> Node | None:
        """Write the start of a region of autocast, or of one with gradients."""
        writer = self._writer
        if not isinstance(region, torch.autocast):
            return self.enter()
        if writer.paused:
            return None
        self._autocasts += 1
        arguments = (writer.device_type(region.device), region.fast_dtype, region._enabled, region._cache_enabled)
        return writer.create("call_function", _enter_autocast, arguments, effect=True)

    def enter_attention(self, backends: Iterable[SDPBackend], by_priority: bool) -> Node | None:
        """Write that attention has these kernels from here."""
        if self._writer.paused:
            return None
        arguments = tuple(backend.value for backend in backends), by_priority
        return self._writer.create("call_function", enter_attention, arguments, effect=True)

    def leave(self, entry: Node | None) -> None:
        """Write the end of the region that ``entry`` began."""
        if entry is not None:
            self._autocasts -= entry.target is _enter_autocast
            if not entry._erased:
                self._writer.create("call_function", REGIONS[entry.target], (entry,), effect=True)


TYPE_READS = frozenset({"type", "element_size", "result_type", "promote_types", "can_cast"})
"""Functions and methods whose results follow from the types of their arguments."""


def computed_from(nodes: Iterable[Node]) -> dict[Node, None]:
    """Nodes that are still in the graph, with all nodes that they are computed from."""
    reached: dict[Node, None] = {}
    waiting = [node for node in nodes if not node._erased]
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached[node] = None
            waiting += node.all_input_nodes
    return reached
