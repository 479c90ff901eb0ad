"""Note what Python code reads in a recorded run: sizes become guards, and values of tensors become obstacles."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache, partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fractrain_fx.capture import targets
from fractrain_fx.capture.recording.ambient import computed_from
from fractrain_fx.capture.recording.arguments import argument
from fractrain_fx.capture.recording.kept.callees import callees
from fractrain_fx.capture.recording.writer import Obstacle, ValueSource, Writer
from fractrain_fx.capture.sizes.guards import Expression, Guard, InputValues, Place, Size, place_of
from fractrain_fx.capture.sizes.results import decided_dims, deciding, guards_an_error, part_count, tests_for_overflow
from fractrain_fx.capture.sizes.symbolic import (
    READS,
    Symbol,
    plain,
    spoofed,
    spoofed_tensor,
    symbol,
    symbolic_shape,
    value_of,
)
from fractrain_fx.capture.source import by_capture, outside_capture
from fractrain_fx.capture.trees import ValueList, has_mask, tensors_in
from fractrain_fx.errors import InputError

__all__ = ["PythonReads", "write_test"]


def _require_as_recorded(value: Any, recorded: Any, message: str) -> None:
    """Raise if a value, or a tensor's truth value, is not as recorded: the graph lacks the model's other path."""
    if isinstance(value, Tensor) and (value.is_meta or torch.compiler.is_compiling()):
        torch._assert_async(value if recorded else torch.logical_not(value), message)
    elif (bool(value) if isinstance(value, Tensor) else value) != recorded:
        raise InputError(
            f"the values of these inputs let the model take another way than the recorded one ({message}): pass inputs "
            "of the recorded kind, or move that code into a submodule with a forward hook, which then stays one call"
        )


def write_test(graph: Graph, guard: Guard) -> None:
    """Make a graph raise if an expression of sizes of its tensors has another value than when it was recorded."""

    def written(operand: Any) -> Any:
        if isinstance(operand, Expression):
            return made(operand.op, *map(written, operand.operands))
        return made(operand.read, operand.node, operand.dim) if isinstance(operand, Size) else operand

    def made(target: Any, *args: Any) -> Node:
        op = "call_method" if isinstance(target, str) else "call_function"
        node = graph.create_node(op, target, args)
        node.meta.update({key: last.meta[key] for key in ("nn_module_stack", "source")})
        return node

    last = max(size.node for size in guard.expression.sizes)
    with graph.inserting_before(last.next):
        message = f"{guard} when recorded, at {guard.place}"
        made(_require_as_recorded, written(guard.expression), guard.value, message).meta["effect"] = True


@cache
def _contiguous_in(memory_format: torch.memory_format) -> Callable[..., bool]:
    def is_contiguous(*numbers: int) -> bool:
        size, stride = numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]
        return torch.empty_strided(size, stride, device="meta").is_contiguous(memory_format=memory_format)

    return is_contiguous


class PythonReads:
    """Notes which sizes and values Python code reads while a model is recorded.

    Attributes:
        read_tied: the path of the first module whose code read values of tied inputs, and the line.
        of_values: calls by which code read values of tensors (``item()``), with the obstacles that they would be.
        sizes: the sizes that code saw, in order.
        constants: names of the tensors that the graph keeps, and whose values code read as numbers.
        spoofed: the numbers of reads that give Python other values than the tensor has.
    """

    def __init__(self, writer: Writer, paths: dict[int, str]) -> None:
        self._writer = writer
        self._paths = paths
        self.read_tied: tuple[str, Place] | None = None
        self.of_values: list[tuple[Node, Obstacle]] = []
        self.sizes: list[Guard] = []
        self.constants: set[str] = set()
        self.spoofed: Collection[int] = ()
        self._parts: dict[tuple[Expression, Any], Node] = {}

    def guards(self, joined: Collection[Node] = ()) -> tuple[Guard, ...]:
        """The guards of all sizes seen, without those on the number of parts of calls that are ``joined`` again."""
        first: dict[tuple[Expression, Any], Guard] = {}
        for guard in self.sizes:
            first.setdefault((guard.expression, guard.value), guard)
        return tuple(guard for key, guard in first.items() if self._parts.get(key) not in joined)

    def values_of(self, tensors: Mapping[str, Any], tied: Collection[str]) -> Iterator[InputValues]:
        """The conditions on the values of tied inputs; none if no code read any."""
        if self.read_tied is not None:
            path, place = self.read_tied
            for index, (name, value) in enumerate(tensors.items()):
                if name in tied:
                    yield InputValues(name, index, value.detach().clone(), place, path)

    def shape(self, x: Tensor, read: Callable[..., Any] = torch.Tensor.size) -> torch.Size:
        """The shape (or the strides), with symbols if it may differ from call to call."""
        if self._writer.known(x) is not None and self._writer.depends(x, ValueSource.INPUT):
            return symbolic_shape(x, read)
        return x.shape if read is torch.Tensor.size else torch.Size(x.stride())

    def contiguous(self, x: Tensor, value: bool, memory_format: torch.memory_format | None) -> bool:
        """Note that Python code asked whether a tensor is contiguous, which its sizes and strides decide."""
        if not self._writer.paused and self._writer.known(x) is not None and self._writer.depends(x, ValueSource.INPUT):
            numbers = (*self.shape(x), *self.shape(x, torch.Tensor.stride))
            self._note(_contiguous_in(memory_format or torch.contiguous_format), numbers, value, sys._getframe(1))
        return value

    def saw(self, op: Callable[..., Any], operands: tuple[Any, ...], value: Any) -> None:
        """Note that Python code saw the result of an operation on sizes."""
        if not self._writer.paused:
            self._note(op, operands, value, sys._getframe(1))

    def cut(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note that a tensor was cut into parts, because Python code sees their number."""
        counted = part_count(name, args, kwargs)
        if counted is not None and isinstance(result, (tuple, list)) and any(self._writer.known(x) for x in result):
            x, dim, count, operands = counted
            node = self._writer.node_of(next(tensors_in(result)))
            size = self.shape(x)[dim]
            key = self._note(count, (size, *operands), len(result), sys._getframe(2))
            if key is not None and node.args:
                self._parts[key] = node.args[0]  # type: ignore[assignment]

    def _note(
        self, op: Callable[..., Any], operands: tuple[Any, ...], value: Any, frame: FrameType
    ) -> tuple[Expression, Any] | None:
        expression = self._expression(op, operands)
        if not expression.sizes or (len(operands) > 1 and len(set(expression.operands)) == 1):
            return None
        frame = outside_capture(frame)
        by_value = next((size for size in expression.sizes if size.read == "item"), None)
        raises = isinstance(value, bool) and guards_an_error(frame, value, called=by_value is not None, compared=True)
        if by_value is not None:
            if raises:
                self._require(op, operands, value, expression, frame)
            else:
                self._block(by_value.node, "item()", frame)
            return None
        if any(size.dim in self._writer.sized_by_data(size.node) for size in expression.sizes):
            if not raises:
                self._saw_data(op, operands, value, expression, frame)
            return None
        self.sizes.append(Guard(expression, value, self._writer.path, place_of(frame)))
        return expression, value

    def _saw_data(
        self, op: Callable[..., Any], operands: tuple[Any, ...], value: Any, expression: Expression, frame: FrameType
    ) -> None:
        """Note that Python code read a size that data decide.

        A test in the model's own code (has a batch any labels?) is made again at every run. Others are obstacles.
        """
        writer = self._writer
        by_model = any(writer.made_from(size.node, ValueSource.MODEL) for size in expression.sizes)
        if by_model or writer.path or not isinstance(value, bool):
            cause = f"what it computes depends on a size that data decide ({expression})"
            writer.block(cause, tuple(callees(frame, self._paths)), place_of(frame).line_only)
            return
        self._require(op, operands, value, expression, frame)

    def _require(
        self, op: Callable[..., Any], operands: tuple[Any, ...], value: bool, expression: Expression, frame: FrameType
    ) -> None:
        """Make the graph raise if a test gives another value than it gave when recorded."""
        writer = self._writer
        test = writer.create("call_function", op, tuple(argument(writer, operand) for operand in operands))
        message = f"{Guard(expression, value, '', place_of(frame))} when recorded, at {place_of(frame)}"
        writer.create("call_function", _require_as_recorded, (test, value, message), effect=True)

    def _expression(self, op: Callable[..., Any], operands: tuple[Any, ...]) -> Expression:
        return Expression(op, tuple(map(self._operand, operands)))

    def _operand(self, value: Any) -> Any:
        if not isinstance(value, Symbol):
            return value
        if value.op is value_of:
            return Size(value.operands[0], 0, "item")
        if value.op not in READS:
            return self._expression(value.op, value.operands)
        x, dim = value.operands
        node = self._writer.known(x)
        return plain(value) if node is None else Size(node, dim, READS[value.op])

    def values(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], frame: FrameType
    ) -> Any:
        """Call ``func``; note it if values become visible to Python code, or decide the size of a tensor.

        A tensor of varying size in the root's own code (a loss over the valid labels) stays in the graph, because its
        rows reach no block of the model.

        Returns:
            The result, or a list of sizes that notes the code that reads it.
        """
        writer, result = self._writer, func(*plain(args), **plain(dict(kwargs)))
        read = targets.gives_values(name, result)
        followed = name in ("item", "tolist") and not isinstance(result, bool)
        if read and (followed or name in targets.TEXT_READS) and writer.depends(args[0], ValueSource.DATA):
            if followed:
                return self._read_value(name, args[0], result, frame)
            return self._read_text(func, name, args, result, frame)
        sized = bool(decided_dims(name, args))
        if not (read or (sized and writer.path)):
            return result
        masked = name in ("__getitem__", "getitem") and has_mask(args[1])
        for x in tensors_in((args, kwargs) if read else deciding(name, args)):
            if writer.depends(x, ValueSource.DATA):
                node = writer.node_of(x)
                truth = isinstance(result, bool) and name in targets.TRUTH_READS
                if truth and (tests_for_overflow(node) or guards_an_error(frame, result, called=name == "item")):
                    # The graph raises where the model would handle an error or overflow: it lacks that branch.
                    message = f"a test of values, {result} when recorded, is {not result} at {place_of(frame)}"
                    writer.create("call_function", _require_as_recorded, (node, result, message), effect=True)
                    continue
                call = "indexing with a boolean mask" if masked else f"{name}()"
                self._block(node, call, frame)
            else:
                self.block(x, name, frame)
        return result

    def notes(self) -> list[str]:
        """A warning about values that were read and that the graph does not use."""
        lines = dict.fromkeys(obstacle.line for node, obstacle in self.of_values if not (node._erased or node.users))
        if not lines:
            return []
        audience = "for code around the graph, such as print or a log, which the rewritten model does not run"
        return [f"forward reads values of tensors at {', '.join(lines)} {audience}"]

    def decided(self, name: str, args: tuple[Any, ...]) -> frozenset[int]:
        """Dimensions of a call's results whose length depends on values that vary."""
        dims = decided_dims(name, args)
        varies = dims and any(self._writer.depends(x, ValueSource.DATA) for x in tensors_in(deciding(name, args)))
        return dims if varies or any(isinstance(arg, ValueList) for arg in args) else frozenset()

    def _read_value(self, name: str, x: Tensor, result: Any, frame: FrameType) -> Any:
        """A number or a list that remembers the tensor whose values it has."""
        node = self._writer.create("call_method", name, (self._writer.node_of(x),))
        value = result
        if name == "item" or x.is_floating_point():  # whole numbers in a list may be sizes, and torch checks their sum
            value = spoofed(result) if len(self.of_values) in self.spoofed else result
            self.of_values.append((node, self._obstacle(node, f"{name}()", frame)))
        if name == "item":
            return symbol(value, value_of, (node,))
        return ValueList(value, node, partial(self._listed, node), partial(self._list_as_text, node))

    def _read_text(self, func: Callable[..., Any], name: str, args: Any, text: str, frame: FrameType) -> str:
        """The text of a tensor. A message or a log does not show in the graph; any other use of the text does."""
        node = self._writer.create("call_method", name, (self._writer.node_of(args[0]),))
        decoy = len(self.of_values) in self.spoofed
        self.of_values.append((node, self._obstacle(node, f"{name}()", frame)))
        return str(func(spoofed_tensor(args[0]), *args[1:])) if decoy else text

    def _list_as_text(self, node: Node, values: list[Any], frame: FrameType) -> str:
        if self._writer.paused or by_capture(frame):
            return repr(values)
        shown = spoofed(values) if len(self.of_values) in self.spoofed else values
        self.of_values.append((node, self._obstacle(node, "the text of tolist()", frame)))
        return repr(shown)

    def _listed(self, node: Node, frame: FrameType) -> None:
        if not (self._writer.paused or by_capture(frame)):
            self._block(node, "tolist()", frame)

    def block(self, x: Tensor, read: str, frame: FrameType) -> None:
        """Note that Python code got something from a tensor through which its values can be read."""
        node = self._writer.node_of(x)
        if self._writer.made_from(node, ValueSource.DATA):
            self._block(node, read, frame)
        elif self.read_tied is None and self._writer.made_from(node, ValueSource.TIED):
            self.read_tied = self._writer.path, place_of(frame)
        self.constants |= {str(used.target) for used in computed_from([node]) if used.op == "get_attr"}

    def _block(self, node: Node, call: str, frame: FrameType) -> None:
        self._writer.obstacles.append(self._obstacle(node, call, frame))

    def _obstacle(self, node: Node, call: str, frame: FrameType) -> Obstacle:
        writer, cause = self._writer, f"what it computes depends on values ({call})"
        if writer.made_from(node, ValueSource.RANDOM) and not writer.made_from(node, ValueSource.INPUT):
            cause = "random numbers decide what it computes (set its rate of dropped layers to 0)"
        return Obstacle(writer.path, cause, tuple(callees(frame, self._paths)), place_of(frame).line_only)
