"""The rewritten graph behind the original model's face."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from torch import nn
from torch.fx import Graph
from torch.fx.passes.infra.pass_base import PassBase

from fractrain_fx.capture import Guard, RecordedModule, Recording
from fractrain_fx.config import FracConfig
from fractrain_fx.config_checks import check_stage
from fractrain_fx.errors import ConfigError, InputError
from fractrain_fx.groups import param_groups
from fractrain_fx.inside import Inside
from fractrain_fx.nn.bits import StageBits
from fractrain_fx.nn.cost import Cost
from fractrain_fx.passes import Block, Op, blocks_of, ops_of
from fractrain_fx.passes.graph import NAMESPACE
from fractrain_fx.precision import Precision

__all__ = ["FracModel"]

# What a FracModel keeps for itself; the rest of its attributes are the original's.
_OWN = "_fractrain"


class FracModel(nn.Module):
    """A model that trains with fractional precision; made by :func:`fractrain_fx.fractrainify`.

    Its modules, parameters and buffers are the original's own objects under their own names; what was inserted lives
    under ``frac``. Attributes that it does not have itself are looked up on the original.
    """

    def __init__(
        self, original: nn.Module, recording: Recording, config: FracConfig, passes: Sequence[PassBase] | None = None
    ) -> None:
        super().__init__()
        self.__dict__[_OWN] = Inside(original, recording, config, passes)
        self._share(recording.train)
        self.training = original.training

    def _share(self, graph_module: RecordedModule) -> None:
        """Hold the very dictionaries of the graph, so that a move or a load reaches both."""
        for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[name] = graph_module.__dict__[name]

    @property
    def _inside(self) -> Inside:
        inside: Inside = self.__dict__[_OWN]
        return inside

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the rewritten graph: the original's arguments, the original's output. The cost is kept in ``cost``.

        Raises:
            InputError: arguments that do not fit what was recorded.
            CalibrationError: evaluation before any activation range was seen.
        """
        inside: Inside = self.__dict__[_OWN]
        return inside.run(args, kwargs, self.training)

    def train(self, mode: bool = True) -> Self:
        """Switch all modules; switching to evaluation looks once whether the activation ranges were seen."""
        super().train(mode)
        for graph_module in self._inside.graphs:
            graph_module.training = mode
        self._inside.variants.train(mode)
        if not mode:
            self._inside.look_for_ranges()
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move or convert all tensors; recordings for other sizes are made anew when they are needed."""
        self._inside.variants.forget()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def calibrate(self, batches: Iterable[Any]) -> None:
        """Fill the activation ranges from batches, in evaluation mode, without training anything.

        Args:
            batches: what a loader gives: a tensor, a tuple whose first element is the input, or a mapping of keywords.
        """
        mode = self.training
        super().train(False)
        seen = self._inside.fill_ranges(batches)
        self.train(mode)
        if not seen:
            raise InputError("calibrate() got no batch: give it a loader, or a list of inputs")
        self._inside.look_for_ranges()

    @property
    def graph_module(self) -> RecordedModule:
        """The rewritten graph of the present mode (one graph serves both modes for most models).

        What runs is a copy in which each quantized op and its quantize nodes are one op, with the same numbers; a
        change to this graph takes effect once it is recompiled.
        """
        recording = self._inside.recording
        return recording.train if self.training else recording.eval

    @property
    def graph(self) -> Graph:
        """The rewritten ``torch.fx.Graph``."""
        return self.graph_module.graph

    @property
    def code(self) -> str:
        """The Python code of the rewritten graph."""
        return self.graph_module.code

    def print_readable(self, **options: Any) -> str:
        """Print the rewritten graph as ``torch.fx.GraphModule.print_readable`` does."""
        return self.graph_module.print_readable(**options)

    @property
    def config(self) -> FracConfig:
        """The configuration this model was rewritten with."""
        return self._inside.config

    @property
    def ops(self) -> list[Op]:
        """Every contraction of the model in order, with its MACs and the reason for its precision."""
        return [op for _, op in ops_of(self._inside.recording.train.graph)]

    @property
    def blocks(self) -> list[Block]:
        """Every block, in order of its entry."""
        return blocks_of(self._inside.recording.train.graph)

    def kernels(self) -> dict[str, str]:
        """How each quantized op multiplies, by name: ``int8``, ``float``, ``not yet timed``, or why it is float.

        With torchao: the numbers in which it computes the op, or why the op stays simulated.
        """
        return self._inside.running[True].kernels()

    @property
    def leaves(self) -> Mapping[str, str]:
        """Modules that were recorded as a whole, with the reason."""
        return self._inside.recording.leaves

    @property
    def guards(self) -> tuple[Guard, ...]:
        """What the model is tied to: sizes that its code looks at, with the lines that look, in training or evaluation.

        A call that does not meet them is recorded anew, or refused (``FracConfig.recordings``).
        """
        found = {str(each): each for guards in self._inside.recording.guards.values() for each in guards.guards}
        return tuple(found.values())

    @property
    def checked(self) -> bool:
        """Whether the recording was compared with the model; tensors without data (meta) cannot be."""
        return self._inside.recording.checked

    @property
    def macs(self) -> int:
        """Forward MACs of one sample over all counted contractions."""
        return sum(op.macs or 0 for op in self.ops)

    @property
    def cost(self) -> Cost:
        """Cost of the last forward, as shares (0..1) of full-precision training."""
        if self._inside.cost is None:
            raise InputError("no forward has run yet, so there is no cost to read: call the model on a batch first")
        return self._inside.cost

    @property
    def batch(self) -> int:
        """Number of samples of the last forward."""
        if self._inside.batch is None:
            raise InputError("no forward has run yet, so there is no batch: call the model on a batch first")
        return self._inside.batch

    @property
    def targets(self) -> tuple[float, ...]:
        """Target cp of each stage in per cent (gated methods only; empty otherwise)."""
        return self._inside.targets

    @property
    def reachable(self) -> tuple[float, float] | None:
        """Lowest and highest cp in per cent that the gates can choose; ``None`` without gates."""
        return self._inside.reachable

    def set_precision(self, precision: Precision) -> None:
        """Give all scheduled ops a precision, now, without touching the graph (``static`` and ``pfq``).

        Raises:
            ConfigError: the method has no scheduled ops, or they keep codes, which hold fewer bits, or torchao
                computes some, at 8 bits always.
        """
        check_stage(self.config, precision)
        for module in self.modules():
            if isinstance(module, StageBits):
                module.set(precision)

    def param_groups(
        self, *, gates: Mapping[str, Any] | None = None, decay_norms_and_biases: bool = True
    ) -> list[dict[str, Any]]:
        """Parameter groups for any optimizer, as :func:`fractrain_fx.groups.param_groups` makes them."""
        return param_groups(self, gates=gates, decay_norms_and_biases=decay_norms_and_biases)

    def restore(self) -> nn.Module:
        """The original module: its own class and names, the present weights (shared, not copied)."""
        original = self._inside.original
        original.training = self.training
        return original

    def save_pretrained(self, directory: str | Path, *, push_to_hub: bool = False, **hub: Any) -> None:
        """Write recipe (``config.json``), example inputs and weights (safetensors) into a directory.

        Args:
            directory: where to; made if it is not there.
            push_to_hub: also upload, as :meth:`push_to_hub` does, to ``repo_id`` or the directory's name.
            hub: ``repo_id`` and what else ``push_to_hub`` takes.
        """
        from fractrain_fx.saving import save

        directory = Path(directory)
        if hub and not push_to_hub:
            raise ConfigError(f"{', '.join(hub)} mean(s) nothing without an upload: add push_to_hub=True")
        save(self, self._inside.recording, directory)
        if push_to_hub:
            self.push_to_hub(hub.pop("repo_id", directory.name), **hub)

    def push_to_hub(self, repo_id: str, **options: Any) -> Any:
        """Upload what ``save_pretrained`` writes, and a model card, through huggingface_hub's ``ModelHubMixin``.

        Args:
            repo_id: repository, such as ``"user/model"``; made if it is not there.
            options: those of ``ModelHubMixin.push_to_hub``: ``private``, ``token``, ``branch``, ``commit_message``, ...

        Returns:
            What ``HfApi.upload_folder`` says of the commit.
        """
        from fractrain_fx.hub import push

        return push(self, repo_id, **options)

    @classmethod
    def from_pretrained(
        cls, directory: str | Path, *, model: nn.Module, passes: Sequence[PassBase] | None = None, **hub: Any
    ) -> FracModel:
        """Rebuild what ``save_pretrained`` wrote.

        Args:
            directory: the directory it wrote, or a repository on the Hub.
            model: a fresh model of the original's architecture; its weights are replaced.
            passes: the chain that rewrote it, where that was not the default one.
            hub: for a repository, options of huggingface_hub's ``snapshot_download``: ``revision``, ``token``, ...

        Raises:
            RunError: the directory is missing, damaged, belongs to another architecture, or cannot be downloaded.
        """
        from fractrain_fx.saving import load

        if Path(directory).is_dir():
            return load(Path(directory), model, passes)
        from fractrain_fx.hub import fetch

        return load(fetch(str(directory), **hub), model, passes)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a checkpoint: a FracModel's, or the original's (which has no ``frac.`` keys) as it is."""
        if not any(key.startswith(f"{NAMESPACE}.") for key in state_dict):
            own = {key: value for key, value in self.state_dict().items() if key.startswith(f"{NAMESPACE}.")}
            state_dict = {**state_dict, **own}
        result = super().load_state_dict(state_dict, strict=strict, assign=assign)
        self._inside.calibrated = False
        self._inside.look_for_ranges()
        return result

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if _OWN not in self.__dict__:
                raise
            return getattr(self._inside.original, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> FracModel:
        inside = self._inside
        train = copy.deepcopy(inside.recording.train, memo)
        evaluate = copy.deepcopy(inside.recording.eval, memo)  # the same copy again where one graph serves both
        # The recording's modules are in the memo now, so the original is copied around the same new ones.
        original = copy.deepcopy(inside.original, memo)
        recording = replace(inside.recording, train=train, eval=evaluate)
        copied = type(self)(original, recording, inside.config, inside.passes)
        copied._inside.targets, copied._inside.reachable = inside.targets, inside.reachable
        copied._inside.calibrated = inside.calibrated
        copied.training = self.training
        memo[id(self)] = copied
        return copied

    def _replicate_for_data_parallel(self) -> FracModel:
        """Refuse what ``nn.DataParallel`` calls for each GPU: all of them would run one graph and keep one cost."""
        raise ConfigError(
            "nn.DataParallel cannot run a rewritten model on several GPUs of one process: start one process a GPU "
            "(torchrun, accelerate launch) with DistributedDataParallel"
        )

    def extra_repr(self) -> str:
        """What was rewritten, in one line."""
        return f"method={self.config.method}, ops={len(self.ops)}, blocks={len(self.blocks)}, macs={self.macs:,}"
