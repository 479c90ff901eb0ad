"""Replace parts of torch while a model is recorded, and restore them afterwards in any case."""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from fractrain_fx.capture import targets
from fractrain_fx.capture.recording.arguments import write_closed
from fractrain_fx.capture.recording.effects import seed_places
from fractrain_fx.capture.recording.hooks import hook_places
from fractrain_fx.capture.recording.kept.callees import Callee, Method, only_constants, own_containers, placed
from fractrain_fx.capture.recording.kept.hidden import MODULE, contractions_in_backward
from fractrain_fx.capture.recording.kept.leaves import Depth, adds_inputs, depth_of
from fractrain_fx.capture.recording.recorder import CAUGHT, Recorder
from fractrain_fx.capture.recording.writer import UnrepresentableError
from fractrain_fx.capture.replaced import Replacement, replaced
from fractrain_fx.capture.sizes.standins import standins
from fractrain_fx.capture.sizes.symbolic import observed, plain
from fractrain_fx.capture.source import listed
from fractrain_fx.capture.state import Generators
from fractrain_fx.capture.trees import hides_tensor, tensors_in

__all__ = ["Calls", "plain_paths", "recording"]


class Calls:
    """Handles each module call of a recorded run; the modules at the paths ``leaves`` stay one node.

    ``weighted`` counts calls of modules that hold parameters. ``arrays`` has functions and methods whose array of numpy
    became a tensor, which other code may not take. ``padded`` has paths of torch's encoders that got a padding mask.
    """

    def __init__(self, model: nn.Module, recorder: Recorder, leaves: Mapping[str, str]) -> None:
        self._recorder = recorder
        self._leaves = leaves
        self.root = model
        self.weighted = 0
        self.arrays: set[Callee] = set()
        self.padded: dict[str, None] = {}
        self._generators = Generators(model)

    def call(self, forward: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Stand in for ``nn.Module.__call__``, which is passed as ``forward``."""
        recorder = self._recorder
        path = recorder.paths.get(id(module))
        self.weighted += any(p is not None for p in module._parameters.values())
        if isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor and path is not None:
            masks = kwargs.get("src_key_padding_mask", args[2] if len(args) > 2 else None)
            self.padded |= {} if masks is None else {path: None}
        if not recorder.writer.paused and path is not None and path not in self._leaves:
            recorder.codes.note(sys._getframe(2))
            recorder.codes.note_forward(module)
        if recorder.writer.paused or path is None or module is self.root:
            return forward(module, *args, **kwargs)
        depth = Depth.LEAF if path in self._leaves else depth_of(module)

        def inside() -> Any:
            with recorder.inside(path, module):
                result = forward(module, *args, **kwargs)
                recorder.writer.require_known(result)
                return result

        def whole() -> Any:
            with recorder.pause(), recorder.hidden.counted(MODULE, trained_only=True):
                return forward(module, *plain(args), **plain(dict(kwargs)))

        if depth is Depth.THROUGH:
            result = inside()
        else:
            maybe = depth is Depth.MAYBE
            result = self._one_node(path, args, kwargs, inside if maybe else whole, maybe)
        recorder.returned(path, result)
        return result

    def notes(self) -> list[str]:
        """Warnings about what modules of torch do in a call that a graph cannot do."""
        if not self.padded:
            return []
        paths = listed([repr(path) if path else "the model" for path in self.padded])
        return [
            f"in evaluation without gradients {paths} (nn.TransformerEncoder) returns zeros at padded places; the "
            "rewritten model returns what it returns there in training: leave these places out of means and maxima, "
            "or build it with enable_nested_tensor=False, which never puts zeros there"
        ]

    def as_one_call(self, callee: Callee) -> tuple[Any, str, Callable[..., Any]]:
        """Owner, name and replacement of a function or method that is to be one call.

        It is refused if a gradient flows through it, it uses weights or it returns anything but tensors.
        """
        recorder = self._recorder
        owner, real = placed(callee, self.root)
        name = callee.name.strip("_")

        def call(*args: Any, **kwargs: Any) -> Any:
            if recorder.writer.paused:
                return real(*args, **kwargs)
            watched, weighted, before = recorder.watch(args, kwargs), self.weighted, self._generators.states()
            with recorder.pause():
                with recorder.hidden.counted(f"the call of {callee}", callee.name):
                    result = real(*plain(args), **plain(kwargs))
                drew = self._generators.states() != before
                if isinstance(result, np.ndarray):
                    result = torch.from_numpy(result)
                    self.arrays.add(callee)
                if weighted == self.weighted and only_constants(result):
                    with contextlib.suppress(UnrepresentableError):
                        target: Any
                        if callee.method:
                            op, kept = "call_module", recorder.writer.additions.kept
                            target = kept("methods", callee, lambda: Method(owner, callee.name))
                        else:
                            op, target = "call_function", targets.function_node(own_containers(real), name)
                        return recorder.write(op, target, args, kwargs, result, watched, random=drew, own=True)
                recorder.refused.add(callee)
                return result

        return owner, callee.name, call

    def _one_node(
        self, path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Callable[[], Any], maybe: bool
    ) -> Any:
        """Run a module and write it as one node; with ``maybe`` only if nothing inside it has to be seen."""
        recorder = self._recorder
        watched, mark = recorder.watch(args, kwargs), recorder.mark()
        try:
            result = run()
        except CAUGHT as error:
            if not maybe:
                recorder.note_error(error, repr(path), args, kwargs)
            raise
        if maybe:
            # A module that adds to a list among its arguments cannot be a node: its result would be its argument.
            same = [id(x) for x in watched.tensors] == [id(x) for x in tensors_in((args, kwargs))]
            numbers = [
                node for node, _ in recorder.reads.of_values[mark.reads :] if node.target not in targets.TEXT_READS
            ]
            passes_on = bool(numbers) and len(recorder.writer.obstacles) == mark.obstacles
            shown = passes_on or recorder.contractions > mark.contractions or adds_inputs(mark.last, watched.tensors)
            if shown or not same or hides_tensor(result) or not recorder.writes((args, kwargs)):
                return result
            recorder.fold(mark)
        with recorder.pause():
            lacks = f"returns a {type(result).__name__}" if hides_tensor(result) else ""
            try:
                if not lacks:
                    return recorder.write("call_module", path, args, kwargs, result, watched, own=True)
            except UnrepresentableError as error:
                lacks = f"is given a {error}"
            recorder.writer.block(f"its child {path!r} stays one node and {lacks}, which no graph holds")
            return result


@contextlib.contextmanager
def recording(recorder: Recorder, calls: Calls, callees: Iterable[Callee]) -> Iterator[None]:
    """Send module calls and autograd functions to ``recorder``, and ``callees`` as one call each."""
    forward = nn.Module.__call__
    apply = torch.autograd.Function.__dict__["apply"]
    move: Callable[..., nn.Module] = nn.Module._apply
    real_len = len

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return calls.call(forward, module, *args, **kwargs)

    def apply_function(cls: Any, *args: Any, **kwargs: Any) -> Any:
        real = apply.__get__(None, cls)
        if recorder.writer.paused:
            return real(*args, **kwargs)
        recorder.codes.note(sys._getframe(1))
        watched = recorder.watch(args, kwargs)
        name, backward = cls.__name__, contractions_in_backward(cls)
        with recorder.pause(), recorder.hidden.counted(f"the autograd Function {name}", name, backward):
            result = real(*plain(args), **plain(dict(kwargs)))
            try:
                target = targets.function_node(real, name, own_backward=True)
                return recorder.write("call_function", target, args, kwargs, result, watched)
            except UnrepresentableError:
                return write_closed(recorder, name, real, args, kwargs, result, watched)

    def length(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim and not recorder.writer.paused:
            return recorder.size("size", (value, 0), {})
        return real_len(value)

    def convert(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        # Routers move a module to its own device or type in forward. This changes nothing and is not recorded.
        with recorder.pause():
            return move(self, *args, **kwargs)

    with (
        plain_paths(checkpointing=recorder.note_checkpointing),
        replaced(
            (nn.Module, "__call__", call),
            (nn.Module, "_apply", convert),
            (nn.Module, "__setattr__", recorder.written.setter(nn.Module.__setattr__)),
            (torch.autograd.Function, "apply", classmethod(apply_function)),
            # ``len`` turns the result of ``__len__`` into a plain int, so a symbolic size would be lost.
            (builtins, "len", length),
        ),
        observed(recorder.reads.saw),
        recorder,
        replaced(*standins(calls.root)),
        replaced(*hook_places(recorder), *seed_places(recorder)),
        replaced(*map(calls.as_one_call, callees)),
    ):
        yield
        recorder.written.finish()


@contextlib.contextmanager
def plain_paths(*, value_free: bool = True, checkpointing: Callable[[], object] = bool) -> Iterator[None]:
    """Run models on their plain path: no fused attention, no compiled children, no activation checkpointing.

    Checkpointing would run batch norms twice. If it is re-entrant, it also hides what it runs, and refuses
    ``torch.autograd.grad``. ``checkpointing`` is called when a model asks for it. ``value_free`` also tells libraries
    that values must not be read, as a CUDA stream capture does. Transformers then always builds attention masks,
    without reading whether this batch needs one.
    """

    def without(function: Callable[..., Any], preserve_random_state: bool, *args: Any) -> Any:
        checkpointing()
        return function(*args)

    def around_nothing(*_: Any, **__: Any) -> Iterator[None]:
        checkpointing()
        yield

    places: list[Replacement] = [(checkpoint.CheckpointFunction, "apply", without)]
    names = ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl")
    places += [(checkpoint, name, around_nothing) for name in names if name in vars(checkpoint)]
    if value_free:
        places.append((torch.cuda, "is_current_stream_capturing", lambda: True))
        places.append((nn.modules.transformer, "_detect_is_causal_mask", _stated_causality))
        masks = sys.modules.get("transformers.masking_utils")
        if hasattr(masks, "_vmap_expansion_sdpa"):
            places.append((masks, "_vmap_expansion_sdpa", _broadcast_mask))
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.compiler.set_stance("force_eager"), replaced(*places):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


def _stated_causality(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Whether a mask was declared causal; torch's own function reads the mask's values if nothing was declared."""
    return is_causal is True


def _broadcast_mask(mask: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Transformers' mask rule for all indices at once, because calls inside ``torch.vmap`` cannot be recorded."""

    def over(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        indices = (batch[:, None, None, None], head[:, None, None], query[:, None], key)
        return mask(*indices).expand(len(batch), len(head), len(query), len(key))

    return over
