"""Write down every torch call of one real run as a node of an fx graph."""

from __future__ import annotations

import contextlib
import math
import sys
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.overrides import TorchFunctionMode

from fractrain_fx.capture import targets
from fractrain_fx.capture.model_errors import is_out_of_memory
from fractrain_fx.capture.recording.ambient import GRADIENT_READS, TYPE_READS, Ambient
from fractrain_fx.capture.recording.arguments import argument, map_results, write_closed
from fractrain_fx.capture.recording.codes import RecordedCode
from fractrain_fx.capture.recording.constants import Additions
from fractrain_fx.capture.recording.effects import Effects, EffectWatch, Written
from fractrain_fx.capture.recording.hooks import HOOKS, History, write_hook
from fractrain_fx.capture.recording.kept.callees import Callee, require_nothing
from fractrain_fx.capture.recording.kept.hidden import MODULE, HiddenCalls, contractions_in_operator, products_after
from fractrain_fx.capture.recording.memory import Memory, note_memory
from fractrain_fx.capture.recording.python_reads import PythonReads
from fractrain_fx.capture.recording.writer import Return, UnrepresentableError, ValueSource, Writer
from fractrain_fx.capture.sizes.results import passed_on
from fractrain_fx.capture.sizes.symbolic import plain
from fractrain_fx.capture.source import by_library, outside_capture
from fractrain_fx.capture.trees import holds_tensor, tensors_in

__all__ = ["CAUGHT", "Recorder"]

CAUGHT = (RuntimeError, IndexError, ValueError)
"""Errors of calls that a model's code may catch to go another way."""


class Mark(NamedTuple):
    """A point in a recording, to return to: its last node, and how much was noted until then."""

    last: Node
    contractions: int
    codes: int
    obstacles: int
    reads: int
    sizes: int
    types: int
    returns: int


_SIZES = frozenset({"size", "numel", "nelement", "stride"})


class Recorder(TorchFunctionMode):
    """While active, runs each torch call and writes it to ``writer``.

    ``returns`` has module calls in the order in which they ended; ``contractions`` counts the written ones through
    which a gradient flows. ``failed`` is the path of the innermost module in whose forward an error was raised.
    ``refused`` has functions and methods that cannot be kept as one call, although they should. ``paths`` (of modules)
    and ``handles`` (of hooks on tensors, each with its node) go by identity. ``written`` has the
    buffers that Python code replaced.
    """

    def __init__(self, model: nn.Module, additions: Additions) -> None:
        super().__init__()
        self.writer = Writer(model, additions)
        self.returns: list[Return] = []
        self.contractions = 0
        self.failed = ""
        self.checkpointed = False
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.refused: set[Callee] = set()
        self.reads = PythonReads(self.writer, self.paths)
        self.ambient = Ambient(model, self.writer)
        self.written = Written(model, self.writer)
        self.hidden = HiddenCalls()
        self.handles: dict[int, tuple[Any, Node]] = {}
        self.codes = RecordedCode()
        self.effects = Effects(model, self._set_unseen)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Run calls without writing them."""
        before, self.writer.paused = self.writer.paused, True
        try:
            yield
        finally:
            self.writer.paused = before

    def note_checkpointing(self) -> None:
        """Note that code asks for activation checkpointing."""
        self.checkpointed |= not self.writer.paused

    @contextlib.contextmanager
    def inside(self, path: str, module: nn.Module) -> Iterator[None]:
        """Attribute calls to the module at ``path``."""
        before = self.writer.stack
        self.writer.stack = OrderedDict(before)
        self.writer.stack[path] = (path, type(module))
        self.writer.stack.move_to_end(path)
        try:
            yield
        except Exception:
            self.failed = self.failed or path
            raise
        finally:
            self.writer.stack = before

    def note_error(self, error: Exception, name: str, args: Any, kwargs: Any) -> None:
        """Note an error of a call: if the run goes on, code has caught it, and values may have decided that it came."""
        frame = outside_capture(sys._getframe(1))
        for x in () if self.writer.paused or is_out_of_memory(error) else tensors_in((args, kwargs)):
            self.reads.block(x, f"{name}, whose {type(error).__name__} it catches", frame)

    def mark(self) -> Mark:
        """The present point of the recording."""
        return Mark(self.writer.last, self.contractions, len(self.codes), *map(len, self._noted()))

    def _noted(self) -> tuple[list[Any], ...]:
        """Everything that is noted in order, as in :class:`Mark`."""
        return self.writer.obstacles, self.reads.of_values, self.reads.sizes, self.ambient.types, self.returns

    def fold(self, mark: Mark) -> None:
        """Remove everything that was written since ``mark``; the node that comes instead has notes on its products."""
        products = products_after(mark.last, lambda node: self.writer.made_from(node, ValueSource.VALUE))
        self.hidden.expect(MODULE, "", products)
        while self.writer.last is not mark.last:
            self.writer.graph.erase_node(self.writer.last)
        for noted, count in zip(self._noted(), mark[3:], strict=True):
            del noted[count:]
        self.codes.forget(mark.codes)

    def writes(self, value: Any) -> bool:
        """Whether a value can be a node's argument."""
        try:
            argument(self.writer, value)
        except UnrepresentableError:
            return False
        return True

    def returned(self, path: str, result: Any) -> None:
        """Note that a call of the module at ``path`` ended."""
        self.returns.append(Return(path, tuple(self.writer.known(x) for x in tensors_in(result))))

    def watch(self, args: Any, kwargs: Any) -> EffectWatch:
        """Watch the tensors among the arguments before a call."""
        with torch._C.DisableTorchFunction():  # reading versions is not a call of the model
            return self.effects.watch(tensors_in((args, kwargs)))

    def write(
        self,
        op: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
        watched: EffectWatch,
        random: bool = False,
        decided: Collection[int] | None = None,
        own: bool = False,
    ) -> Any:
        """Add the node of a call that has run, and map its results (see :func:`map_results`).

        A call that returns nothing is there for its effect: a check of values, a log. One that returns no tensor and
        changes none leaves no node. ``random``: it draws numbers outside torch. ``decided``: dimensions of its results
        whose length depends on values. ``own``: it runs code of the model.
        """
        writer = self.writer
        changed, drawn = self.effects.since(watched)
        drawn = drawn or random
        nothing = result is None and (own or any(writer.depends(x, ValueSource.DATA) for x in watched.tensors))
        if not (nothing or changed or holds_tensor(result)):
            self.hidden.forget()
            return result
        taken, in_place = {id(x) for x in watched.tensors}, {id(x) for x in changed}
        off = not torch.is_grad_enabled()
        # A result that requires a gradient all the same is a new leaf; one that is an argument keeps its history.
        same = off and any(id(x) in taken - in_place for x in tensors_in(result))
        cut = off and not same and not any(x.requires_grad for x in tensors_in(result))
        cut = cut or (off and bool(in_place) and str(target) != "requires_grad_")
        region = self.ambient.enter(False) if same else None
        node = writer.create(
            op,
            target,
            tuple(argument(writer, value, cut) for value in args),
            argument(writer, dict(kwargs), cut),
            effect=bool(changed) or drawn or nothing,
        )
        note_memory(node, Memory.of(args, kwargs, result, in_place))
        if nothing and own:
            writer.create("call_function", require_nothing, (node,), effect=True)
        self.ambient.leave(region)
        self.hidden.note_on(node)
        if drawn:
            writer.mark_random(node)
        for x in changed:
            writer.touched(x, node, result, cut)
        forms = [(x, writer.sized_by_data(writer.known(x))) for x in watched.tensors]
        if cut and op != "call_module":
            writer.cut.add(node)
        mapped = map_results(writer, result, node, taken, in_place, cut=cut)
        if decided or any(dims for _, dims in forms):
            for x in tensors_in(mapped):
                dims = decided or passed_on(str(getattr(target, "__name__", target)), x, forms)
                writer.mark_sized(x, frozenset(dims))
        return mapped

    def _set_unseen(self) -> None:
        self.writer.block("it sets a generator of random numbers in a way that torch does not show")

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a torch call and write its node."""
        kwargs = kwargs or {}
        if self.writer.paused:
            return self.hidden.seen(func, func(*args, **kwargs))
        self.codes.note(sys._getframe(1))
        through = targets.call_through(func, args, kwargs)
        if through is not None:
            with self:
                return through(*args, **kwargs)
        name = targets.getter_name(func)
        if name is not None:
            return self._property(func, name, args)
        (op, target), ordered = targets.resolve(func, args, kwargs)
        name = str(target if op == "call_method" else getattr(func, "__name__", "call"))
        if name in _SIZES:
            return self.size(name, args, kwargs)
        if name == "is_contiguous":
            return self.reads.contiguous(args[0], func(*args, **kwargs), kwargs.get("memory_format", (*args, None)[1]))
        self.ambient.read_fact(name, args, sys._getframe(1))
        watched = self.watch(args, kwargs)
        if name in TYPE_READS:
            self.ambient.read_types(tensors_in((args, kwargs)))
        try:
            result = self.reads.values(func, name, args, kwargs, sys._getframe(1))
        except CAUGHT as error:
            self.note_error(error, f"{name}()", args, kwargs)
            raise
        if (operator := targets.operator_name(func)) is not None:
            known = contractions_in_operator(operator, (args, kwargs))
            self.hidden.expect(f"the operator {operator}", operator.rpartition("::")[2], known)
        if name in HOOKS:
            return write_hook(self, name, (*args, *kwargs.values()), result)
        if targets.call_name(func) in targets.CONTRACTIONS and any(x.requires_grad for x in tensors_in(result)):
            self.contractions += 1
        try:
            result = self.write(op, target, ordered, kwargs, result, watched, decided=self.reads.decided(name, args))
        except UnrepresentableError:
            return write_closed(self, name, func, args, kwargs, result, watched)
        self.reads.cut(name, args, kwargs, result)
        return result

    def _property(self, func: Any, name: str, args: tuple[Any, ...]) -> Any:
        if name == "shape":
            self.ambient.read_shape(args[0], sys._getframe(2))
            return self.reads.shape(args[0])
        if name in ("nbytes", "itemsize", "dtype"):
            self.ambient.read_types(args)
        self.ambient.read_fact(name, args, sys._getframe(2))
        if name == "_version" and not by_library(sys._getframe(2)):
            self.writer.block("it reads the version counter of a tensor")
        if name == "nbytes":
            return self.size("numel", args, {}) * args[0].element_size()
        watched = self.watch(args, {})
        result, sets = func(*plain(args)), func.__name__ == "__set__"
        if name in GRADIENT_READS and not sets:
            self.ambient.read_gradient(args[0], name, sys._getframe(2))
            if name == "grad_fn" and result is not None and not by_library(sys._getframe(2)):
                return History(result, self)
        if sets:
            arguments = tuple(argument(self.writer, value) for value in (args[0], name, args[1]))
            self.writer.create("call_function", setattr, arguments, effect=True)
            self.writer.forget_detached(arguments[0])
            return result
        if isinstance(result, Tensor):
            return self.write("call_function", getattr, (args[0], name), {}, result, watched)
        if targets.gives_values(name, result):
            self.reads.block(args[0], name, sys._getframe(2))
        return result

    def size(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of ``size``, ``stride``, ``numel`` or ``nelement``, symbolic if it may differ between calls."""
        self.ambient.read_shape(args[0], outside_capture(sys._getframe(1)))
        shape = self.reads.shape(args[0], torch.Tensor.stride if name == "stride" else torch.Tensor.size)
        if name in ("numel", "nelement"):
            return math.prod(shape)
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        sizes = tuple(shape) if name == "stride" else shape
        return sizes if dim is None else shape[dim]
