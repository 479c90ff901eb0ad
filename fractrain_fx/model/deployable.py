"""The part of a rewritten model that leaves training: saved, as a plain module, or as files for other libraries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from fractrain_fx.capture import Recording
from fractrain_fx.capture.state import in_mode
from fractrain_fx.capture.trees import tensors_in
from fractrain_fx.config.checks import check_stage
from fractrain_fx.config.precision import Precision
from fractrain_fx.durable import require_folder
from fractrain_fx.errors import CalibrationError, ConfigError, ExportError
from fractrain_fx.model.frozen.packing import Packable
from fractrain_fx.nn.bits import set_stage, stage_of
from fractrain_fx.passes import blocks_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fractrain_fx.export.factors import FrozenOp
    from fractrain_fx.export.result import Exported, FixedChoices
    from fractrain_fx.export.write import Request

__all__ = ["Deployable"]

_Stage = int | str | Precision | None
_Choices = Literal["commonest"] | Mapping[str, int] | None
Shares = Mapping[str, float]


class Deployable(Packable):
    """The part of :class:`fractrain_fx.FracModel` that leaves training: saved, or with its low precision."""

    def save_pretrained(
        self,
        directory: str | Path,
        *,
        results: Mapping[str, float] | None = None,
        push_to_hub: bool = False,
        **hub: Any,
    ) -> None:
        """Write recipe, example inputs, weights (safetensors) and a model card into a directory.

        A model of Hugging Face's is written so that ``AutoModel.from_pretrained`` of transformers loads the float model
        from the same directory; one with weights as codes is not.

        Args:
            directory: made if it does not exist.
            results: measures of the trained model for its card, by name; by default those of the last evaluation that a
                trainer made.
            push_to_hub: also upload with :meth:`push_to_hub`, to ``repo_id`` or the directory's name.
            hub: ``repo_id`` and other options of ``push_to_hub``.

        Raises:
            ConfigError: options of ``push_to_hub`` without it.
            ModelError: modules or parameters of the original were replaced.
        """
        from fractrain_fx.model.saved.folder import save

        directory = Path(directory)
        if hub and not push_to_hub:
            raise ConfigError(f"{', '.join(hub)} only matter(s) for an upload: add push_to_hub=True")
        if results is not None:
            self._state.results = {name: float(value) for name, value in results.items()}
        save(self, directory, str(hub.get("repo_id", directory.name)))
        if push_to_hub:
            self.push_to_hub(hub.pop("repo_id", directory.name), **hub)

    def push_to_hub(self, repo_id: str, **options: Any) -> Any:
        """Upload what ``save_pretrained`` writes through huggingface_hub's ``ModelHubMixin``.

        Args:
            repo_id: repository, such as ``"user/model"``; made if it does not exist.
            options: those of ``ModelHubMixin.push_to_hub``: ``private``, ``token``, ``branch``, ``commit_message``, ...

        Returns:
            The result of ``HfApi.upload_folder``.
        """
        from fractrain_fx.model.saved.hub import push

        return push(self, repo_id, **options)

    def deployed(
        self,
        stage: _Stage = None,
        *,
        levels: Literal["exact", "integer"] = "exact",
        choices: _Choices = None,
        batches: Iterable[Any] | None = None,
    ) -> nn.Module:
        """A plain module that computes what this model's evaluation computes, without anything that trains.

        Weights are rounded, ranges are fixed, and gates are gone. Where rounded layers and attention are all that the
        model multiplies, it is the original's class with the original's names, so that ``generate`` of transformers
        works with its cache. Else it is the evaluation graph.

        Args:
            stage: the precision of all that the stage steers: a precision, the number of one of PFQ's stages (-1 is the
                last), or ``None`` for the present one. With gates it takes the place of their choices.
            levels: of format ``affine``. ``integer`` gives those that integer kernels multiply: an activation's are
                moved by at most half a level so that one is 0, and a weight's lie evenly around 0.
            choices: ``commonest`` fixes the option that most samples of ``batches`` choose in each gated block; or the
                number of the option of each block.
            batches: pairs of input and label, or mappings of keyword arguments with labels.

        Returns:
            The module, in evaluation mode. ``float_products`` names the products that are not rounded in it though they
            were in training; ``difference`` is the largest difference of outputs from evaluation on the example inputs,
            as a share of the largest output; ``fixed_choices`` says what fixing choices costs.

        Raises:
            ExportError: gates choose, and neither ``stage`` nor ``choices`` is given; or frozen weights are codes.
            CalibrationError: activation ranges were never seen.
        """
        from fractrain_fx.export.graph import deploy

        state, listed = self._state, None if batches is None else list(batches)
        fixed, shares = self._fixed(stage, choices, listed)
        ops = self._frozen(state.recording, fixed, levels)
        plain: Any = deploy(state.original, state.recording, ops, self._skipped(fixed))
        plain.difference = self._difference(plain, fixed)
        plain.fixed_choices = self._cost_of(plain, fixed, shares, listed)
        return plain  # type: ignore[no-any-return]

    def export(
        self,
        folder: str | Path,
        *,
        format: Literal["onnx", "compressed-tensors", "torchao"] = "onnx",
        stage: _Stage = None,
        levels: Literal["exact", "integer"] = "exact",
        choices: _Choices = None,
        batches: Iterable[Any] | None = None,
        **options: Any,
    ) -> Exported:
        """Write the model, with the precision that it was trained with, for another library.

        Args:
            folder: made if it does not exist.
            format: ``onnx`` for onnxruntime, TensorRT and OpenVINO; ``compressed-tensors`` for transformers and vLLM;
                ``torchao`` for torchao's tensor classes.
            stage: as :meth:`deployed` takes it, like ``levels`` and ``choices``.
            levels: see there.
            choices: see there.
            batches: see there; ``compressed-tensors`` also measures the range of activations of format ``nvfp4`` on it.
            options: of format ``onnx``: ``fold_batch_norm=True`` folds batch norms into convolutions,
                ``fold_weights=True`` writes weights for onnxruntime, ``dynamic=False`` keeps the sizes of the example
                inputs.

        Returns:
            The files with their bytes, and what is otherwise than in evaluation.

        Raises:
            ExportError: the format cannot hold this precision. Nothing was written.
            CalibrationError: activation ranges were never seen.
            MissingPackageError: the format's library is not installed.
            RunError: the folder cannot be made or written to.
        """
        from fractrain_fx.export.write import require_known_format, write

        require_known_format(format, options)
        require_folder(Path(folder))
        listed = None if batches is None else list(batches)
        fixed, shares = self._fixed(stage, choices, listed)
        exported = write(Path(folder), format, self._request(format, fixed, listed, levels, **options))
        if shares is None:
            return exported
        cost = self._cost_of(self.deployed(choices=fixed, levels=levels), fixed, shares, listed)
        return replace(exported, choices=cost)

    def _request(self, format: str, fixed: Any, batches: Any, levels: Any = "exact", **options: Any) -> Request:
        """What :meth:`export` would write, after the check that the format can hold it."""
        from fractrain_fx.export.write import Request, check

        graphs = self._unlabelled() if format == "onnx" else self._state.recording
        frozen, skipped = self._frozen(graphs, fixed, levels), self._skipped(fixed)
        request = Request(self._state.original, graphs, frozen, skipped, levels, batches, options)
        check(format, request)
        return request

    def _fixed(self, stage: _Stage, choices: _Choices, batches: list[Any] | None) -> tuple[Any, Shares | None]:
        """What takes the place of gates and stage, and the shares of samples that chose so."""
        from fractrain_fx.export.choices import commonest

        config = self.frac_config
        if choices is not None and (stage is not None or not config.gated):
            raise ExportError(
                "choices fixes the options of gates: leave stage out"
                if config.gated
                else f"choices fixes the options of gates, and method {config.method!r} has none: leave it out"
            )
        if choices == "commonest":
            if not batches:
                raise ExportError(
                    "choices='commonest' counts the choices on batches: give batches=[(input, label), ...]"
                )
            with self._evaluating():
                return commonest(self, batches)
        if choices is not None:
            return choices, None
        if isinstance(stage, int):
            if config.gated:
                raise ExportError(
                    f"stage={stage} is a cost target under method {config.method!r}, not a precision: give "
                    "stage='8/8', or choices='commonest'"
                )
            stages = config.precision_stages
            if not -len(stages) <= stage < len(stages):
                raise ExportError(
                    f"stage={stage} does not exist: the stages are 0 to {len(stages) - 1}, -1 is the last"
                )
            return stages[stage], None
        precision = None if stage is None else Precision.parse(stage)
        if precision is not None and config.scheduled:
            check_stage(config, precision)
        return precision, None

    def _frozen(self, recording: Recording, fixed: Any, levels: Any) -> list[FrozenOp]:
        from fractrain_fx.export.factors import frozen_ops
        from fractrain_fx.export.rounding import require_levels

        require_levels(levels)
        state = self._state
        state.as_recorded.require_structure("deployed() and export() would read parts that were never trained")
        if state.sharding is not None:
            raise ExportError(
                "weights of this model are shards: write it with save_pretrained (on all processes), and export what "
                "from_pretrained reads"
            )
        state.look_for_ranges()
        if not state.calibrated:
            raise CalibrationError(
                "activation ranges were never seen, so there is nothing to fix: train the model for a step, load a "
                "trained checkpoint, or call model.calibrate(loader) with a few batches"
            )
        return frozen_ops(recording.eval, fixed, levels)

    def _skipped(self, fixed: Any) -> set[str]:
        """The gated blocks that every sample skips."""
        if not isinstance(fixed, Mapping):
            return set()
        options = self.frac_config.gate_options
        skippable = {block.name for block in blocks_of(self._state.recording.eval.graph) if block.skip is not None}
        return {block for block, option in fixed.items() if options[option].skips and block in skippable}

    def _unlabelled(self) -> Recording:
        """The recording for calls without labels, which files for inference do not take."""
        from fractrain_fx.capture.inputs.examples_hf import is_hugging_face

        state, recording = self._state, self._state.recording
        if not is_hugging_face(state.original):
            return recording
        from transformers.utils.generic import find_labels

        labels = set(find_labels(type(state.original)))  # type: ignore[no-untyped-call]
        if not labels & recording.kwargs.keys():
            return recording
        args, kwargs = recording.present((recording.args, dict(recording.kwargs)))
        kwargs = {name: value for name, value in kwargs.items() if name not in labels}
        with self._evaluating():
            return state.variants.choose(args, kwargs, False)[0].recording

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        with in_mode(self, training=False), torch.no_grad():
            yield

    def _difference(self, plain: nn.Module, fixed: Any) -> float:
        """The largest difference of outputs on the example inputs, as a share of the largest output."""
        recording, before = self._state.recording, stage_of(self)
        args, kwargs = recording.present((recording.args, dict(recording.kwargs)))
        if isinstance(fixed, Precision):
            set_stage(self, fixed)
        try:
            with self._evaluating():
                ours = list(tensors_in(self(*args, **kwargs)))
                theirs = list(tensors_in(plain(*args, **kwargs)))
        finally:
            if before is not None:
                set_stage(self, before)
        pairs = [(x, y) for x, y in zip(ours, theirs, strict=True) if x.is_floating_point() and x.numel()]
        return max((float((x - y).abs().max() / x.abs().max().clamp(min=1e-30)) for x, y in pairs), default=0.0)

    def _cost_of(
        self, plain: nn.Module, fixed: Any, shares: Shares | None, batches: list[Any] | None
    ) -> FixedChoices | None:
        from fractrain_fx.export.choices import measured

        if shares is None or batches is None:
            return None
        with self._evaluating():
            return measured(self, plain, batches, (fixed, shares))
