"""Record a model on example inputs, and check that the graph equals it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fractrain_fx.capture.asked import ReadCircumstance
from fractrain_fx.capture.attempts import record_until_equal
from fractrain_fx.capture.checking.check import Batching
from fractrain_fx.capture.checking.first_call import Errors, FloatGraph, first_difference
from fractrain_fx.capture.checking.guard_check import Guards
from fractrain_fx.capture.circumstances.python_state import PythonState
from fractrain_fx.capture.inputs.call import Arguments, CallSpec, Example, describe_call
from fractrain_fx.capture.inputs.data import has_data, without_data
from fractrain_fx.capture.layerdrop import dropped_in_graph
from fractrain_fx.capture.model_errors import model_errors
from fractrain_fx.capture.module import RecordedModule
from fractrain_fx.capture.recording.kept.leaves import hooks_left_out
from fractrain_fx.capture.sizes.guards import Guard, InputValues
from fractrain_fx.capture.source import in_words
from fractrain_fx.capture.state import Snapshot
from fractrain_fx.capture.surroundings import Surroundings
from fractrain_fx.capture.trees import map_copies, map_tensors, tensors_in
from fractrain_fx.errors import CaptureError

__all__ = ["Recording", "record"]


@dataclass(frozen=True)
class Recording:
    """A model as a graph.

    Attributes:
        train: the graph in train mode; its output is the model's own output structure.
        eval: the graph in eval mode: the same object if one graph serves both, else a graph that shares its children.
        call: the form of call that the graph takes.
        leaves: path and reason of each module that is kept as one node although it is not a leaf.
        args: positional example inputs, in containers of their own.
        kwargs: keyword example inputs.
        inputs: those of them that the graph takes.
        batching: how inputs grow with samples; ``FIXED``: the graph only holds for the example's batch size.
        checked: whether the graph was compared with the model; tensors without data (meta) cannot be.
        guards: conditions on sizes, and on values of inputs that hold sizes, for the graphs of training (``True``)
            and evaluation.
        python: attributes whose values decided what was recorded.
        types: the floating types of the model's parameters by name, if code read the type of a tensor; else ``None``.
        seen: for each mode, the circumstances of a call that code read.
        input_types: for each input tensor its type, if code read it; else ``None``. Their kinds are part of ``call``.
        plain: for each mode the graph before passes change it, to compare with the model on later calls.
        home: name, type and device of the first parameter of a floating type, if there is one.
    """

    train: RecordedModule
    eval: RecordedModule
    call: CallSpec
    leaves: Mapping[str, str]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: tuple[Any, ...]
    batching: Batching
    checked: bool
    guards: Mapping[bool, Guards]
    python: PythonState
    types: Mapping[str, torch.dtype] | None = None
    seen: Mapping[bool, tuple[ReadCircumstance, ...]] = field(default_factory=lambda: {True: (), False: ()})
    input_types: tuple[torch.dtype | None, ...] = ()
    plain: Mapping[bool, FloatGraph] = field(default_factory=dict)
    home: tuple[str, torch.dtype, torch.device] | None = None

    @property
    def fixed_batch(self) -> bool:
        """Whether the graph only holds for the example's batch size."""
        return self.batching is Batching.FIXED

    def failed_guard(self, values: tuple[Any, ...], model: nn.Module, training: bool) -> Guard | InputValues | None:
        """The first guard of a mode's graph that does not hold for a call; ``None`` if the graph equals the model."""
        return self.guards[training].failed_guard(values, self.train if training else self.eval, model)

    def difference(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        training: bool,
        errors: Errors = "both",
    ) -> str | None:
        """The difference between the model and its graph on a call, in words; ``None`` if they agree.

        The model keeps its buffers, attributes, hooks and random generators. ``errors``: in which of them an error is a
        difference, if the other one runs.
        """
        return self._difference(model, self._example(args, kwargs), training, errors)

    def holds_again(self, model: nn.Module, training: bool) -> bool:
        """Whether the graph equals the model on the example: if not, the model has changed since."""
        args, kwargs = self.present((self.args, dict(self.kwargs)))
        return self.difference(model, args, kwargs, training) is None

    def value_difference(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool
    ) -> str | None:
        """The difference on a call with other floating values, in words; ``None`` if either refuses such values."""
        example = self._example(args, kwargs).with_other_values()
        return None if example is None else self._difference(model, example, training, "none")

    def _example(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Example:
        return self.call.example(args, {**dict(self.call.implied), **kwargs})

    def _difference(self, model: nn.Module, example: Example, training: bool, errors: Errors) -> str | None:
        graph, plain, difference = self.train if training else self.eval, self.plain[training], None
        # Without hooks of other users, and if they differ so with those of the recording: they may collect features.
        for hooks in dict.fromkeys((plain.hooks, plain.hooks | plain.inner_hooks)):
            difference = first_difference(model, graph, plain, example, training, hooks, errors=errors)
            if difference is None:
                break
        return difference

    def other_types(self, model: nn.Module) -> str | None:
        """The recorded types of parameters, in words, if the model has others now and the graph depends on them.

        A parameter that is gone has no type: it is kept in another form.
        """
        if self.types is None or all(self.types.get(name, now) == now for name, now in _types_of(model).items()):
            return None
        return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in set(self.types.values())))

    def takes_types(self, values: Any) -> bool:
        """Whether the tensors of a call have the types that the recorded code read."""
        pairs = zip(tensors_in(values), self.input_types, strict=False)
        return all(wanted is None or x.dtype == wanted for x, wanted in pairs)

    def present(self, values: Any) -> Any:
        """Example inputs, moved and cast as the model was since it was recorded."""
        name, dtype, device = self.home or ("", None, None)
        if (now := dict(self.train.named_parameters()).get(name)) is None:  # also if it is kept in another form
            return values

        def follow(x: Tensor) -> Tensor:
            return x.to(now.device if x.device == device else x.device, now.dtype if x.dtype == dtype else x.dtype)

        return map_copies(values, follow)

    @property
    def graphs(self) -> tuple[RecordedModule, ...]:
        """The graph that serves both modes, or the graphs of training and evaluation."""
        return (self.train,) if self.eval is self.train else (self.train, self.eval)


def record(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    batch_axis: int = 0,
    check: bool = True,
    surroundings: Surroundings | None = None,
    joined: bool = False,
) -> Recording:
    """Record one real run of ``model`` in each mode as a graph on the model's own modules and parameters.

    The model is left as it was (buffers, gradients, mode flags and random generators), except for tables that it makes
    at its first call.

    A model on the meta device is recorded from shapes alone. Its example inputs are moved there too, and nothing is
    compared, because there are no values.

    Args:
        model: any module without an attribute ``frac``.
        args: positional example inputs.
        kwargs: keyword example inputs.
        batch_axis: dimension of the inputs that holds the samples, for the check at another batch size.
        check: compare the graph with the model (outputs, gradients, buffers).
        surroundings: how the call is made; by default with gradients on, and all parts in the model's mode.
        joined: arguments that are one tensor stay one. Otherwise the graph takes each as a tensor of its own.

    Raises:
        CaptureError: the model computes something that a graph cannot hold; names the module, the cause and a way out.
        InputError: the example inputs do not fit the model.
    """
    if hasattr(model, "frac"):
        raise CaptureError(
            f"{in_words(model)} has an attribute 'frac', the name under which inserted modules go: rename it"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            f"{type(model).__name__} is a TorchScript module, whose calls are not seen: pass the Python module"
        )
    real = has_data(model)
    keep = (lambda x: x) if joined else _separately()
    args, kwargs = map_tensors((tuple(args), dict(kwargs or {})), keep)  # a caller may change its containers
    if not real:
        args, kwargs = without_data((args, kwargs))
    example = describe_call(model, args, kwargs)
    arguments = Arguments(example)
    with dropped_in_graph(model) as notes:
        around = surroundings or Surroundings()
        snapshot = _fill_caches(model, example, around) if real else Snapshot(model, around)
        arguments.notes(model, None)  # a changed object would be another argument in the next run
        with snapshot.preserved(), torch.enable_grad(), around.applied(model):
            accepted = record_until_equal(snapshot, example, batch_axis, check and real)
    graphs, runs, mode = accepted.attempt.graphs, accepted.attempt.runs, model.training
    python, typed = PythonState.joined(run.python for run in runs.values()), runs[True].typed | runs[False].typed
    shared = graphs[True] is graphs[False]
    modes = [mode for mode in runs if mode or not shared]
    plain = {mode: FloatGraph.of(runs[mode].graph, runs[mode].returns, runs[mode].seen, model) for mode in modes}
    recorded = Recording(
        train=graphs[True],
        eval=graphs[False],
        call=example.spec,
        leaves=accepted.one_nodes.modules,
        args=args,
        kwargs=kwargs,
        inputs=tuple(example.tensors.values()),
        batching=accepted.batching,
        checked=accepted.checked,
        guards={mode: run.guards for mode, run in runs.items()},
        python=replace(python, notes=(*python.notes, *notes, *hooks_left_out(model))),
        types=_types_of(model) if python.types else None,
        seen={mode: run.seen for mode, run in runs.items()},
        plain={True: plain[True], False: plain[True] if shared else plain[False]},
        input_types=tuple(x.dtype if i in typed else None for i, x in enumerate(tensors_in(example.tensors))),
        home=next(((name, x.dtype, x.device) for name, x in model.named_parameters() if x.is_floating_point()), None),
    )
    for graph in recorded.graphs:
        graph.set_mode(mode)
    return recorded


def _separately() -> Callable[[Tensor], Tensor]:
    """A function that gives the second and later places of a tensor one of their own."""
    met: set[int] = set()

    def apart(x: Tensor) -> Tensor:
        new = x.detach().requires_grad_(x.requires_grad) if id(x) in met else x
        met.add(id(x))
        return new

    return apart


def _types_of(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: x.dtype for name, x in model.named_parameters() if x.is_floating_point()}


def _fill_caches(model: nn.Module, example: Example, surroundings: Surroundings) -> Snapshot:
    """Let ``model`` make such tables now (relative positions for an image size), and keep nothing else of the run.

    A graph only reads a buffer that the model would first replace by one of another shape, so this must happen before.
    A model that rejects the example is left alone, and its next run reports the error.

    Returns:
        The state of the model after that.
    """
    tables: list[tuple[nn.Module, str, Tensor]] = []
    snapshot = Snapshot(model, surroundings)
    shapes = {(module, name): x.shape for module in model.modules() for name, x in _caches(module)}
    try:
        with snapshot.preserved(), torch.no_grad():
            example.run(model.eval())
            for module in model.modules():
                tables += [(module, name, x) for name, x in _caches(module) if shapes.get((module, name)) != x.shape]
    except model_errors():
        return snapshot
    for module, name, x in tables:
        module.register_buffer(name, x, persistent=False)
    if not tables:
        return snapshot
    del snapshot  # before the next one copies all parameters again
    return Snapshot(model, surroundings)


def _caches(module: nn.Module) -> list[tuple[str, Tensor]]:
    buffers = module._buffers
    return [(name, x) for name in module._non_persistent_buffers_set if (x := buffers.get(name)) is not None]
