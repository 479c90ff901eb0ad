"""FracModel: the rewritten graph with the names and attributes of the original model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.fx.passes.infra.pass_base import PassBase

from fractrain_fx.capture.state import in_mode, switch
from fractrain_fx.config.checks import check_stage
from fractrain_fx.config.precision import Precision
from fractrain_fx.config.targets import scheduled_precision
from fractrain_fx.engine.steered import is_steered, steered_model
from fractrain_fx.errors import ConfigError, InputError, ModelError
from fractrain_fx.model.deployable import Deployable
from fractrain_fx.model.float_calls import belongs_to_original, require_no_part
from fractrain_fx.model.frozen.packing import require_form, require_stage, unpack
from fractrain_fx.model.frozen.rounded import rounded_copy
from fractrain_fx.model.loops import param_groups, refuse_plain_fit, refuse_plain_trainer
from fractrain_fx.model.state import ModelState
from fractrain_fx.nn.bits import set_stage, stage_of
from fractrain_fx.passes.graph.edit import NAMESPACE
from fractrain_fx.rewriting import OWN, Rewritten

__all__ = ["FracModel", "rewritten_in"]


class FracModel(Deployable):
    """A model that trains with fractional precision; made by :func:`fractrain_fx.fractrainify`.

    Its modules, parameters and buffers are the original's own objects under their own names; inserted ones live under
    ``frac``. Attributes that it does not have itself are looked up on the original.
    """

    def __init__(self, rewritten: Rewritten) -> None:
        super().__init__()
        self._wear(ModelState(rewritten))

    def _wear(self, state: ModelState) -> None:
        """Take a state, and share the dictionaries of its graph module, so that moving or loading one changes both."""
        self.training = state.original.training
        for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[name] = state.recording.train.__dict__[name]
        self.__dict__[OWN] = state
        state.variants.train(self.training)  # what was inserted is new, and modules begin in training mode

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the rewritten graph: same arguments and output as the original. ``cost`` keeps the cost of this call.

        Raises:
            InputError: the arguments fit no recording, and the model cannot be recorded for them.
            ModelError: modules or parameters of the original were replaced.
            CalibrationError: the model is evaluated before its activation ranges were seen or could be measured.
        """
        state: ModelState = self.__dict__[OWN]
        if self.training and not torch.compiler.is_compiling():
            refuse_plain_fit(self)
        return state.run(args, kwargs, self.training)

    def train(self, mode: bool = True) -> Self:
        """Switch the mode; checks that the original is as recorded and, for evaluation, which ranges were seen.

        Raises:
            ModelError: modules or parameters of the original were replaced.
        """
        if mode:
            refuse_plain_trainer(self)
        state: ModelState = self.__dict__[OWN]
        if mode != self.training:
            state.as_recorded.check_closely()
        self.__dict__["training"] = mode
        # The original may leave parts of itself in eval mode: frozen stages, batch norms of a detector.
        switch(state.original, training=mode)
        state.variants.train(mode)
        if not mode:
            state.look_for_ranges()
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move or convert all tensors. Recordings for other calls are made again when a call needs them."""
        refuse_plain_trainer(self)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._state.variants.forget()
        return self

    def calibrate(self, batches: Iterable[Any]) -> None:
        """Fill the activation ranges from batches, in evaluation mode, without training anything.

        Args:
            batches: each a tensor, a tuple whose first element is the input, or a mapping of keyword arguments.

        Raises:
            InputError: there is no batch.
        """
        with in_mode(self, training=False):
            count = self._state.fill_ranges(batches)
        if not count:
            raise InputError("calibrate() got no batch: give it a loader, or a list of inputs")
        self._state.look_for_ranges()

    def set_precision(self, precision: Precision | str) -> None:
        """Set the precision of all scheduled ops without changing the graph (``static`` and ``pfq``).

        Raises:
            ConfigError: the method has no scheduled ops, there are 0 bits, the format has no elements of these bits,
                or frozen weights are codes of other bits.
        """
        precision = Precision.parse(precision)
        check_stage(self.frac_config, precision)
        require_stage(self._state, precision)
        self._set_stage(precision)

    def set_target(self, target: float) -> None:
        """Set the precision of the ops that no gate can choose for to that of a stage with this target cp, in per cent.

        ``Engine`` calls it at turning points. The graph does not change.
        """
        if self.frac_config.gated:
            self._set_stage(scheduled_precision(self.frac_config, target))

    def _set_stage(self, precision: Precision) -> None:
        self._state.engine_stage = None
        set_stage(self, precision)

    def param_groups(
        self, *, gates: Mapping[str, Any] | None = None, decay_norms_and_biases: bool = True
    ) -> list[dict[str, Any]]:
        """Parameter groups for any optimizer, as :func:`fractrain_fx.model.loops.param_groups` makes them."""
        return param_groups(self, gates=gates, decay_norms_and_biases=decay_norms_and_biases)

    def look_for_changes(self) -> None:
        """Compare the original with the recording; warns of attributes and hooks that have no effect.

        ``Engine.end_epoch`` calls it too.

        Raises:
            ModelError: modules or parameters of the original were replaced, added, removed, tied or untied.
        """
        self._state.as_recorded.check_closely()

    def restore(self, *, rounded: bool = False, structure_changed: bool = False) -> nn.Module:
        """The original module: its own class and names, the present weights (shared, not copied).

        It computes in float, which gives other results than the rewritten model; a warning says so once. Frozen weights
        that are codes become float parameters with the rounded values.

        Args:
            rounded: return a copy whose weights have the values that training multiplied, rounded to the bits of the
                present stage. Activations stay float.
            structure_changed: return the original although its modules or parameters are not those that were trained.

        Raises:
            ModelError: they are not, and ``structure_changed`` is false; or the model is sharded; or a weight has
                several rounded values.
            ConfigError: the number format rounds weights anew for each product.
        """
        if self._state.sharding is not None:
            raise ModelError(
                "restore() would hand out shards of weights, which nothing gathers: write the model with "
                "save_pretrained (on all processes) and restore what from_pretrained reads; or take whole weights with "
                "torch.distributed.checkpoint.state_dict.get_model_state_dict and load them into an unsharded model"
            )
        exact = unpack(self._state)
        original = self._state.handed_out(structure_changed)
        original.training = self.training
        if rounded:
            return rounded_copy(original, self._state.recording.train, exact)
        self._state.tell_float()
        return original

    @classmethod
    def from_pretrained(
        cls, directory: str | Path, *, model: nn.Module, passes: Sequence[PassBase] | None = None, **hub: Any
    ) -> Self:
        """Rebuild a model that ``save_pretrained`` wrote.

        Args:
            directory: the directory it wrote, or a repository on the Hub.
            model: a fresh model of the original's architecture; its weights are replaced.
            passes: the chain of passes that rewrote it, if not the default one.
            hub: for a repository, options of huggingface_hub's ``snapshot_download``: ``revision``, ``token``, ...

        Raises:
            RunError: the directory is missing, damaged, belongs to another architecture, or cannot be downloaded.
        """
        from fractrain_fx.model.saved.folder import load, load_weights

        path = Path(directory)
        if not path.is_dir():
            from fractrain_fx.model.saved.hub import fetch

            path = fetch(str(directory), **hub)
        rebuilt = cls(load(path, model, passes))
        rebuilt.checkpoint_as_before()
        load_weights(rebuilt, path)
        return rebuilt

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a checkpoint of a FracModel, or of the original, which has no ``frac.`` keys.

        A sharded model takes its shards from whole tensors. The precision of the checkpoint's stage is loaded too; a
        model that an engine steers trains on with the engine's.

        Raises:
            ModelError: the checkpoint has floats of weights that the model keeps as codes, or the other way round.
        """
        require_form(self._state, state_dict)
        if not any(key.startswith(f"{NAMESPACE}.") for key in state_dict):
            inserted = {key: value for key, value in self.state_dict().items() if key.startswith(f"{NAMESPACE}.")}
            state_dict = {**state_dict, **inserted}
        if self._state.sharding is not None:
            state_dict = self._state.sharding.shards_of(self, state_dict)
        if is_steered(self) and self._state.engine_stage is None:
            self._state.engine_stage = stage_of(self)
        result = super().load_state_dict(state_dict, strict=strict, assign=assign)
        if assign:
            self._state.as_recorded.structure.retie()
        self._state.calibrated = False
        self._state.measure_examples(self)
        return result

    def __getattr__(self, name: str) -> Any:
        state: ModelState | None = self.__dict__.get(OWN)
        try:
            value = super().__getattr__(name)
        except AttributeError:
            if state is None:
                raise
            value = getattr(state.original, name)
        return value if state is None else state.float_calls.looked_up(name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; the original's attributes are set on the original. Warns if the graph ignores the change.

        Raises:
            ModelError: it is a module or parameter for which the graph was not made.
        """
        state: ModelState | None = self.__dict__.get(OWN)
        if state is None:
            super().__setattr__(name, value)
            return
        require_no_part(self, name, value)
        if belongs_to_original(self, state.original, name, state.as_recorded.reads(name)):
            setattr(state.original, name, value)
            state.as_recorded.check_closely()
        else:
            super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> FracModel:
        copied = type(self).__new__(type(self))
        nn.Module.__init__(copied)
        copied._wear(self._state.copied(memo))
        copied.training = self.training
        memo[id(self)] = copied
        return copied

    def _replicate_for_data_parallel(self) -> FracModel:
        """Refuse ``nn.DataParallel``, which calls this for each GPU: replicas would share one graph and one cost."""
        raise ConfigError(
            "nn.DataParallel cannot run a rewritten model on several GPUs of one process: start one process a GPU "
            "(torchrun, accelerate launch) with DistributedDataParallel"
        )


def rewritten_in(model: Any, asked_by: str) -> FracModel:
    """The rewritten model itself, or inside ``torch.compile``, data parallelism or transformers' ``trainer.model``.

    Raises:
        InputError: there is none; the message names the function that was ``asked_by``.
    """
    inner = steered_model(model, asked_by)
    if not isinstance(inner, FracModel):  # a class that pretends to be a FracModel has no graph
        raise InputError(f"{asked_by} needs a model made by fractrainify, got {type(inner).__name__}")
    return inner
