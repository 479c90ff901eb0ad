"""Find out which sizes of a run's tensors data decide: the call that makes one cannot give it without values.

A call is made again on tensors without data, and only if code looks at a size of its result.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx import Node

from fractrain_fx.capture.model_errors import model_errors
from fractrain_fx.capture.recording.writer import Source, Writer
from fractrain_fx.capture.sizes.results import ALL_DIMS, decided_dims, passed_on
from fractrain_fx.capture.sizes.symbolic import SymbolicInt, of_values, plain
from fractrain_fx.capture.state import Snapshot
from fractrain_fx.capture.targets import function_node, operator_name
from fractrain_fx.capture.trees import ValueList, is_strided, leaves_in, map_tree, tensors_in

__all__ = ["Decided", "Sizes"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """Dimensions of a tensor whose length does not follow from the sizes of the inputs alone.

    Attributes:
        data: data decide the length.
        unknown: data may decide it: the call does not run without values, and torch does not say why.
    """

    data: frozenset[int] = frozenset()
    unknown: frozenset[int] = frozenset()


_OF_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
# Torch's calls that may count floats, and products of experts, whose form follows from those of the operands: they run
# without data from torch 2.15 on.
_COUNTS = re.compile("where|nonzero|unique|masked_select|bincount|sparse|values|indices")
_FIXED_FORMS = ("_grouped_mm", "grouped_mm")

_FIXED = Sizes()
Made = tuple["_Call", int]
"""A call, and the place of a tensor among its results."""


class Operand(NamedTuple):
    """A tensor that a call got: its shape then, whether its values vary, and the node that it came from."""

    tensor: Tensor
    shape: Shape
    varies: bool
    node: Node | None


@dataclass
class _Call:
    """A call of the recorded run.

    Attributes:
        run: makes it again; ``None`` for a function of the model, which may keep what it computes.
        name: its name.
        own: whether code of the model runs, which may read values for other things than sizes.
        args: positional and keyword arguments.
        operands: the tensors among them.
        shapes: the shapes of its results.
        in_place: whether a result is an operand.
        ragged: whether a tensor among operands and results is nested.
        sizes: for each result, once code has looked at any.
    """

    run: Callable[..., Any] | None
    name: str
    own: bool
    args: tuple[tuple[Any, ...], Mapping[str, Any]]
    operands: list[Operand]
    shapes: list[Shape]
    in_place: bool
    ragged: bool
    sizes: list[Sizes] | None = None

    @property
    def may_take_sizes(self) -> bool:
        """Whether a size can come from values. Torch takes none from floats, unless it counts some of them."""
        if self.name in _FIXED_FORMS:
            return False
        read = any(isinstance(x, ValueList) or of_values(x) for x in leaves_in(self.args))
        if read or self.own or _COUNTS.search(self.name):
            return any(x.varies for x in self.operands)
        return any(x.varies and not (x.tensor.is_floating_point() and x.shape) for x in self.operands)


class Decided:
    """Remembers the calls of a run.

    Args:
        model: the model that is recorded.
        writer: the graph.
    """

    def __init__(self, model: nn.Module, writer: Writer) -> None:
        self._model, self._writer = model, writer
        self._made: dict[Node, Made] = {}

    def operands(self, tensors: Iterable[Tensor]) -> list[Operand]:
        """The tensors that a call is about to get, as they are now: it may change them."""
        depends, known = self._writer.depends, self._writer.known
        return [Operand(x, _shape(x), depends(x, Source.DATA), known(x)) for x in tensors]

    def inner(self, result: Any, op: str) -> list[Made | None]:
        """For each tensor that a module returns, the call inside it that made the tensor, if it was recorded."""
        nodes = map(self._writer.node_before, tensors_in(result) if op == "call_module" else ())
        return [None if node is None else self._made.get(node) for node in nodes]

    def note(
        self,
        op: str,
        target: Any,
        args: tuple[tuple[Any, ...], Mapping[str, Any]],
        operands: list[Operand],
        result: Any,
        inner: list[Made | None],
        own: bool,
    ) -> None:
        """Remember a call that has run.

        Args:
            op: of its node.
            target: of its node.
            args: positional and keyword arguments.
            operands: see :meth:`operands`.
            result: what it returned.
            inner: see :meth:`inner`.
            own: whether it is a function or a method of the model.
        """
        found = list(tensors_in(result))
        taken = {id(each.tensor) for each in operands}
        name = str(target if op == "call_method" else getattr(target, "__name__", target))
        call = _Call(
            run=None if own else self._runner(op, target),
            name=name,
            own=self._runs_own_code(op, target),
            args=args,
            operands=operands,
            shapes=list(map(_shape, found)),
            in_place=any(id(x) in taken for x in found),
            ragged=any(x.is_nested for x in (*found, *(each.tensor for each in operands))),
        )
        for place, x in enumerate(found):
            node = self._writer.known(x)
            if node is not None:
                self._made[node] = (inner[place] if inner else None) or (call, place)

    def sizes(self, node: Node) -> Sizes:
        """The dimensions of a node's tensor whose length does not follow from the sizes of the inputs."""
        waiting = [node]
        while waiting:
            call = self._call(waiting[-1])
            rest = [x.node for x in call.operands if x.node is not None and self._open(x.node)] if call else []
            if rest:
                waiting += rest
            else:
                waiting.pop()
                if call is not None and call.sizes is None:
                    with self._aside():
                        call.sizes = self._sizes_of(call)
        call = self._call(node)
        return _FIXED if call is None or call.sizes is None else call.sizes[self._made[node][1]]

    def release(self) -> None:
        """Let go of all tensors of the run."""
        self._made.clear()

    def _call(self, node: Node) -> _Call | None:
        return self._made[node][0] if node in self._made else None

    def _open(self, node: Node) -> bool:
        call = self._call(node)
        return call is not None and call.sizes is None

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        before, self._writer.paused = self._writer.paused, True
        try:
            with torch.no_grad():
                yield
        finally:
            self._writer.paused = before

    def _runner(self, op: str, target: Any) -> Callable[..., Any]:
        if op == "call_function":
            return target  # type: ignore[no-any-return]
        if op == "call_method":
            return lambda x, *args, **kwargs: getattr(x, target)(*args, **kwargs)
        return lambda *args, **kwargs: self._run_part(target, args, kwargs)

    def _runs_own_code(self, op: str, target: Any) -> bool:
        """Whether a call may run code that is not torch's: of a part, an autograd function, another library."""
        if op != "call_module":
            library = operator_name(target) or "aten"
            return getattr(target, "__module__", None) == function_node.__module__ or not library.startswith("aten")
        part = None if target.startswith("frac.") else self._model.get_submodule(target)
        return not type(part).__module__.startswith("torch.nn.")

    def _run_part(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module with tensors without data instead of its own, and leave it as it was."""
        part = self._model.get_submodule(path)
        places = (
            (f"{name}.{key}".lstrip("."), x)
            for name, each in part.named_modules()
            for key, x in (*each._parameters.items(), *each._buffers.items())
        )
        state = {name: _without_data(x) for name, x in places if x is not None}
        with Snapshot(part, held=()).preserved():
            return torch.func.functional_call(part, state, args, kwargs, tie_weights=False)

    def _sizes_of(self, call: _Call) -> list[Sizes]:
        given = [(x.shape, _FIXED if x.node is None else self.sizes(x.node)) for x in call.operands]
        inherited = [_inherited(call.name, shape, given) for shape in call.shapes]
        if call.in_place or call.ragged or not call.may_take_sizes:
            return inherited
        own = self._own_dims(call)
        if own is None:
            return [Sizes(each.data, ALL_DIMS) for each in inherited]
        return [Sizes(each.data | dims, each.unknown) for each, dims in zip(inherited, own, strict=True)]

    def _own_dims(self, call: _Call) -> list[frozenset[int]] | None:
        """For each result the dimensions whose length this call takes from data; ``None`` if it does not say."""
        known = decided_dims(call.name, (*call.args[0], *call.args[1].values()))
        every = [known or ALL_DIMS] * len(call.shapes)
        if call.run is None:
            return None
        try:
            found = self._made_again(call)
        except model_errors() as error:
            if call.own or not isinstance(error, _OF_VALUES):
                return None
            return (self._by_numbers(call) if isinstance(error, DataDependentOutputException) else None) or every
        read = list(leaves_in(call.args))
        if any(isinstance(each, SymbolicInt) and of_values(each) for each in read):
            return self._by_numbers(call) or every
        dims = _differing([call.shapes, found])
        return every if dims is None or any(isinstance(each, ValueList) for each in read) else dims

    def _by_numbers(self, call: _Call) -> list[frozenset[int]] | None:
        """The dimensions whose length changes with the numbers that a call reads from tensors of one element."""
        try:
            # The end of a slice may lie behind the end of a tensor, so small numbers are tried, not near ones.
            return _differing([call.shapes, *(self._made_again(call, first) for first in ((0, 0), (1, 1)))])
        except model_errors():
            return None

    def _made_again(self, call: _Call, numbers: tuple[int, int] | None = None) -> list[Shape]:
        """The shapes of a call's results without data.

        ``numbers``: the first number to take for those that data would give, and the step to the next one.
        """
        first, step = numbers or (0, 0)
        read, varying = 0, {id(x.tensor) for x in call.operands if x.varies}

        def change(x: Any) -> Any:
            nonlocal read
            number = isinstance(x, SymbolicInt) and of_values(x)
            number = number or (id(x) in varying and x.ndim == 0 and x.dtype != torch.bool)
            if numbers is not None and number:
                read += 1
                return first + step * (read - 1)
            if not isinstance(x, Tensor):
                return plain(x)
            return _without_data(x) if id(x) in varying else mode.from_tensor(x)

        assert call.run is not None
        with FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True) as mode:
            args, kwargs = map_tree(call.args, change)
            return list(map(_shape, tensors_in(call.run(*args, **kwargs))))


def _shape(x: Tensor) -> Shape:
    return () if x.is_nested else tuple(x.shape)


def _without_data(x: Tensor) -> Tensor:
    """A tensor of the same form, made in the mode of tensors without data that is active."""
    if not is_strided(x):
        return torch.empty(x.shape, dtype=x.dtype, device=x.device, layout=x.layout)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _differing(shapes: list[list[Shape]]) -> list[frozenset[int]] | None:
    """For each result the dimensions that are not the same in all runs; ``None`` if the results do not match."""
    if len(set(map(len, shapes))) != 1:
        return None
    found = []
    for runs in zip(*shapes, strict=True):
        if len(set(map(len, runs))) != 1:
            return None
        found.append(frozenset(dim for dim, sizes in enumerate(zip(*runs, strict=True)) if len(set(sizes)) > 1))
    return found


def _inherited(name: str, shape: Shape, operands: Collection[tuple[Shape, Sizes]]) -> Sizes:
    """The dimensions of a result that are data's or unknown, because those of an operand are."""
    data = unknown = frozenset[int]()
    if any(sizes.data for _, sizes in operands):
        data = passed_on(name, shape, [(each, sizes.data) for each, sizes in operands])
    if any(sizes.unknown for _, sizes in operands):
        # An operand of the same shape fixes it: the sum of a residual connection has the shape of the way past.
        fixed = any(each == shape and not sizes.unknown for each, sizes in operands)
        unknown = frozenset() if fixed else passed_on(name, shape, [(each, sizes.unknown) for each, sizes in operands])
    return Sizes(data, unknown)
