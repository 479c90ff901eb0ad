"""The private state of a FracModel: it runs the rewritten graph, and keeps its cost, ranges and recordings."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fractrain_fx.capture import RecordedModule, Recording, call_of
from fractrain_fx.capture.circumstances.original import OriginalCheck
from fractrain_fx.capture.circumstances.python_state import carried_between
from fractrain_fx.capture.source import warn
from fractrain_fx.capture.state import Snapshot, in_mode
from fractrain_fx.capture.trees import tensors_in
from fractrain_fx.config.precision import Precision
from fractrain_fx.errors import CalibrationError
from fractrain_fx.formats.scratch import forget_results
from fractrain_fx.model.executed import Wrapping
from fractrain_fx.model.failures import run_graph
from fractrain_fx.model.float_calls import FloatCalls
from fractrain_fx.model.frozen.costs import Frozen
from fractrain_fx.model.recordings.variant import Variant, called_by, token_count
from fractrain_fx.model.recordings.variants import Variants
from fractrain_fx.model.sharding import Sharding
from fractrain_fx.model.watcher import Watcher, counts_step, watched_step
from fractrain_fx.nn.bits import set_stage
from fractrain_fx.nn.cost import Forward
from fractrain_fx.nn.ranges import RunningRange
from fractrain_fx.passes import ops_of
from fractrain_fx.passes.graph.edit import NAMESPACE
from fractrain_fx.rewriting import Rewritten

__all__ = ["ModelState"]

_PROVISIONAL = (
    "this model is evaluated before it was trained: activations are rounded in ranges that were measured on the "
    "example inputs, and are provisional until a training step or model.calibrate(loader)"
)

_FLOAT = (
    "restore() gives the original model, which computes in float and skips no block, so its results differ from those "
    "of the rewritten model. Evaluate the rewritten model for results at trained precision; restore(rounded=True) "
    "gives a copy with weights rounded as they were trained"
)


class ModelState:
    """The private state of a FracModel, in one object so that no name collides with the original's attributes.

    Attributes:
        targets: target cp of each stage in per cent, if there are gates.
        reach: the costs that the model can have, if there are gates.
        to_count: the forward that the next loss counts. One that trains ``waits`` for its loss, whatever runs after it.
        runs: training forwards with gradients so far, without those of compiled code.
        engine_stage: the precision to train on with, if a checkpoint of another was loaded while an engine steers.
        measured: whether every activation range was seen (then ``calibrated``), or measured on the example inputs.
        passes: the chain of passes that rewrote the model, if not the default one.
        running: the copies that run in training (``True``) and evaluation.
        variants: the recording and those made for other sizes and other arguments.
        checkpointing: options of ``torch.utils.checkpoint.checkpoint`` if training computes activations again.
        compiler: options of ``torch.compile`` if segments are compiled one by one.
    """

    def __init__(
        self, rewritten: Rewritten, as_recorded: OriginalCheck | None = None, *, calibrated: bool = False
    ) -> None:
        original, recording, config = rewritten.original, rewritten.recording, rewritten.config
        self.original = original
        self.recording = recording
        self.config = config
        self.rounding = rewritten.rounding
        self.passes = rewritten.chain
        self.targets = rewritten.targets
        self.reach = rewritten.reach
        self.last: Forward | None = None
        self.to_count: Forward | None = None
        self.waits = False
        self.results: dict[str, float] = {}
        self.runs = 0
        self.engine_stage: Precision | None = None
        self.calibrated = self.measured = calibrated
        self._told_provisional = self._told_float = False
        self.checkpointing: Mapping[str, Any] | None = None
        self.compiler: Mapping[str, Any] | None = None
        self.watcher: Watcher | None = None
        self.sharding: Sharding | None = None
        self.variants = Variants(rewritten)
        self.running = self.variants.first.running
        self._compiled_call: tuple[tuple[Any, ...], int | None] | None = None
        self._frozen = Frozen(recording.graphs, config, self._forget_costs)
        called = called_by(original, recording)
        self.as_recorded = as_recorded or OriginalCheck(original, recording.train, recording.python.read, called)
        self._noted = set(recording.python.notes)
        self.variants.on_recorded = self._watch
        self.float_calls = FloatCalls(original, self.as_recorded.uncalled, self.as_recorded.check_closely)

    def _forget_costs(self) -> None:
        self.variants.forget()
        for costs in self.variants.first.costs.values():
            costs.forget()

    def _watch(self, recording: Recording) -> None:
        """Watch what a further recording depends on, and tell what it leaves out."""
        self.as_recorded.watch(recording.python.read)
        for note in (*recording.python.notes, *carried_between(each.recording.python for each in self.variants)):
            if note not in self._noted:
                warn(f"{type(self.original).__name__}: {note}")
            self._noted.add(note)

    @property
    def graphs(self) -> list[RecordedModule]:
        """The shown graphs and their copies that run."""
        return [graph for variant in self.variants for graph in variant.graphs]

    def prepare(self, training: bool) -> None:
        """Follow what changed since the last call. Compiled code cannot: call it before."""
        self.as_recorded.check()
        forget_results()
        self.reach = self._frozen.follow(self.reach, self.targets)
        if training and self.engine_stage is not None:
            set_stage(self.recording.train, self.engine_stage)
            self.engine_stage = None

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool) -> Any:
        """Run the copy for training or evaluation; keep its cost and return the original's output."""
        compiling, trains = torch.compiler.is_compiling(), training and torch.is_grad_enabled()
        if not compiling:
            self.prepare(training)
            self.runs += trains
        if not (training or self.measured):
            raise CalibrationError(
                "this model is evaluated before its activation ranges were seen: train it for a step, "
                "load a trained checkpoint, or call model.calibrate(loader) with a few batches"
            )
        if not (training or compiling or self.calibrated or self._told_provisional):
            self._told_provisional = True
            warn(_PROVISIONAL)
        if self.sharding is not None:
            self.sharding.require_call()
        runs = self.variants.compared.runs
        variant, values = self.variants.choose(args, kwargs, training)
        if not compiling and self.variants.compared.runs > runs:
            self.as_recorded.adopt()
        samples, tokens = variant.count(values), token_count(values)
        if not compiling:
            variant.follow_costs(values, samples, training)
        elif variant is self.variants.first and trains:
            self._compiled_call = values, samples
        graph = self._graph(variant, training)
        if compiling or not counts_step(self.watcher, training):
            output, cost = run_graph(graph, values, variant.recording)
        else:
            compiled = self.compiler is not None
            with watched_step(self.watcher, variant.running[True].current, compiled, self.checkpointing is not None):
                output, cost = run_graph(graph, values, variant.recording)
            self.watcher.note_choices(cost.choice)
        self.last = Forward(cost, samples, tokens, training)
        if trains or not self.waits:
            self.to_count, self.waits = self.last, trains
        if self.sharding is not None and training:
            self.sharding.share_buffers(self.running[True].changing_buffers)
        return output

    def count_compiled(self) -> None:
        """Let further compiled calls be counted at the sizes of the last one, which could not look at its own."""
        if self._compiled_call is not None:
            self.variants.first.follow_costs(*self._compiled_call, training=True)
            self._compiled_call = None

    def _graph(self, variant: Variant, training: bool) -> RecordedModule:
        """The copy to run, as a chain of segments if something asks for them."""
        running = variant.running[training]
        if self.checkpointing is None and self.sharding is None and self.compiler is None:
            return running.current()
        wrapping = self.wrapping(training and torch.is_grad_enabled())
        return running.current() if all(option is None for option in wrapping) else running.chained(wrapping)

    def wrapping(self, gradients: bool) -> Wrapping:
        """The wrappers of each segment in a call with or without gradients."""
        groups_of = None if self.sharding is None else self.sharding.groups_of
        return Wrapping(self.checkpointing if gradients else None, groups_of, self.compiler)

    def follow_frozen(self) -> None:
        """Update costs from the present ``requires_grad`` of the parameters, unless torch is compiling."""
        if not torch.compiler.is_compiling():
            self.reach = self._frozen.follow(self.reach, self.targets)

    def handed_out(self, structure_changed: bool) -> nn.Module:
        """The original, for :meth:`fractrain_fx.FracModel.restore`."""
        if structure_changed:
            self.as_recorded.structure.adopt()
        else:
            self.as_recorded.require_structure(
                "restore() would hand out parts that were never trained",
                ", in which new parts start from their present weights",
            )
        self.float_calls.be_silent()
        return self.original

    def tell_float(self) -> None:
        """Warn once that the original computes otherwise than the rewritten model, if it does."""
        modes = {op.precision.mode for _, op in ops_of(self.recording.train.graph)} - {"float", "uncounted"}
        if modes and not self._told_float:
            self._told_float = True
            adapters = ". save_adapter(folder) writes adapters that name the rounded base that they were trained on"
            warn(_FLOAT + (adapters if hasattr(self.original, "peft_config") else ""))

    def copied(self, memo: dict[int, Any]) -> ModelState:
        """A copy around copies of the original and of the graphs."""
        self.float_calls.disarm()
        self.follow_frozen()
        for costs in self.variants.first.costs.values():
            costs.use_example()
        train = copy.deepcopy(self.recording.train, memo)
        evaluate = copy.deepcopy(self.recording.eval, memo)  # the same copy again if one graph serves both modes
        # The memo has the copied modules of the recording now, so the copy of the original uses the same ones.
        original = copy.deepcopy(self.original, memo)
        recording = replace(self.recording, train=train, eval=evaluate)
        how = (self.config, self.rounding, self.passes)
        rewritten = Rewritten(original, recording, *how, self.targets, self.reach)
        copied = ModelState(rewritten, copy.deepcopy(self.as_recorded, memo), calibrated=self.calibrated)
        copied.measured = self.measured
        copied.checkpointing, copied.compiler = self.checkpointing, self.compiler
        if self.sharding is None:
            copied.variants.closed = self.variants.closed
        return copied

    def look_for_ranges(self) -> None:
        """Check whether every activation range has been seen by now."""
        if not self.calibrated:
            self.calibrated = all(bool(range_.seen) for range_ in self._ranges())
            self.measured = self.measured or self.calibrated

    def measure_examples(self, model: nn.Module) -> None:
        """Measure ranges that no batch has filled on the example inputs, for evaluations before training.

        They stay marked as not seen, so the first batch replaces them. Nothing else changes: parts of the model keep
        their modes, buffers and generators. Without data, and with shards, nothing is measured.
        """
        tensors = (*model.parameters(), *model.buffers(), *tensors_in(self.recording.inputs))
        if self.sharding is not None or any(x.is_meta for x in tensors):
            return
        self.look_for_ranges()
        if self.calibrated:
            return
        example, unseen = self._example(model), [range_ for range_ in self._ranges() if not range_.seen]
        modules = [*model.modules(), *self.graphs]
        modes = [module.training for module in modules]
        try:
            with Snapshot(self.original).preserved():
                for module in modules:
                    module.training = False
                self._fill([example], unseen)
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode
            for range_ in unseen:
                range_.seen.fill_(False)
        self.measured = True

    def _example(self, model: nn.Module) -> tuple[Variant, tuple[Any, ...]]:
        """The recording that fits the example inputs as the model takes them now, and these."""
        recording = self.recording
        values: tuple[Any, ...] = recording.present(recording.inputs)
        if recording.other_types(self.original) is None and recording.takes_types(values):
            return self.variants.first, values
        with in_mode(model, training=False):
            return self.variants.choose(recording.present(recording.args), recording.present(recording.kwargs), False)

    def fill_ranges(self, batches: Iterable[Any]) -> int:
        """Update the activation ranges from batches that run in evaluation mode; returns the number of batches."""
        calls = map(call_of, batches)
        count = self._fill((self.variants.choose(args, kwargs, False) for args, kwargs in calls), self._ranges())
        if self.sharding is not None:
            self.sharding.share_buffers(self.running[True].changing_buffers)
        return count

    def _fill(self, calls: Iterable[tuple[Variant, tuple[Any, ...]]], ranges: Collection[RunningRange]) -> int:
        count = 0
        with torch.no_grad():
            for variant, values in calls:
                # Only now, because choosing a variant may record the model, which sets the modes of its modules.
                modes = [range_.training for range_ in ranges]
                for range_ in ranges:
                    range_.train()
                try:
                    run_graph(self._graph(variant, False), values, variant.recording)
                finally:
                    for range_, mode in zip(ranges, modes, strict=True):
                        range_.train(mode)
                count += 1
        return count

    def _ranges(self) -> list[RunningRange]:
        inserted = self.recording.train._modules.get(NAMESPACE)
        return [module for module in inserted.modules() if isinstance(module, RunningRange)] if inserted else []
