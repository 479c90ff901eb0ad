"""All settings of a training run, as plain frozen values that fit into one YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from fractrain_fx.config import FracConfig, RunConfig
from fractrain_fx.config.kinds import check_kinds, require_numbers
from fractrain_fx.config.plain import read_yaml, write_yaml
from fractrain_fx.errors import ConfigError, near
from fractrain_fx.training.data.dataset import Augmentation
from fractrain_fx.training.data.splits import Setting
from fractrain_fx.training.override import from_recipe, refuse_unread

__all__ = ["RunSettings", "TrainSettings", "flat_name", "identity"]

Optimizer = Literal["sgd", "adam", "adamw"]
LrSchedule = Literal["cosine", "steps", "inverse-sqrt", "constant"]
MixedPrecision = Literal["no", "fp16", "bf16"]
Device = Literal["auto", "cpu", "cuda", "mps"]
GateLr = Literal["peak", "model"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
CUDA_GRAPHS: tuple[CompileMode, ...] = ("reduce-overhead", "max-autotune")
"""The modes that launch a step as CUDA graphs."""

_NO_MATTER = ("device", "workers", "data_dir")  # a run may continue with other values of these settings
_SEEDS = 2**32  # NumPy takes no larger seed


@dataclass(frozen=True)
class TrainSettings:
    """Settings of the training loop.

    Attributes:
        epochs: length of the run; ignored if ``iterations`` is given.
        iterations: length of the run in optimizer steps; the last epoch may be cut short.
        epoch_steps: optimizer steps of an epoch, which ends with evaluation, checkpoint and maybe a new stage; by
            default a pass over the training samples.
        batch_size: samples of a batch in one process.
        optimizer: ``sgd`` (momentum 0.9), ``adam`` or ``adamw``; by default ``sgd`` for classification, else ``adamw``.
        lr: peak learning rate; by default 0.1 for ``sgd`` and 0.003 for the others.
        lr_schedule: the learning rate after the warm-up: ``cosine`` down to nearly 0, ``steps`` at the milestones,
            ``inverse-sqrt`` (of the step, from the end of the warm-up) or ``constant``.
        milestones: shares of the run after which ``steps`` multiplies the rate by ``lr_decay``; the paper's epochs 80
            and 120 of 160 are 0.5 and 0.75 for every length of the run.
        lr_decay: factor of the rate at each milestone of ``steps``.
        warm_up: share of the run over which the rate rises linearly; by default one epoch for ``cosine``, else none.
        gate_lr: learning rate of the gates. ``model``: the model's rate in each step, as in the authors' code.
            ``peak``: always the peak rate.
        gate_lr_factor: factor of the gates' rate.
        betas: averaging factors of ``adam`` and ``adamw``.
        eps: the number that ``adam`` and ``adamw`` add to the denominator.
        weight_decay: weight decay; the paper's is 1e-4.
        accumulate: batches whose mean gradient makes one optimizer step; the last step of an epoch may have fewer.
        seed: seed of weights, order of samples and rounding noise.
        device: ``auto`` (accelerate decides), ``cpu``, ``cuda`` or ``mps``.
        mixed_precision: ``no``, ``fp16`` or ``bf16``, for ops that are not quantized.
        compile: use ``torch.compile`` on the whole model. By default a run of 3,000 batches or more on an NVIDIA GPU
            does, as CUDA graphs, unless it is sharded, compiled by segment, checkpointed or in ``fp16``.
        compile_mode: mode of ``torch.compile``. ``reduce-overhead`` launches a step as CUDA graphs, which on a GPU is
            far quicker for small layers.
        compile_segments: compile the parts of the model one by one, for a shorter first step; also with ``shard``.
        checkpointing: keep fewer activations: backward computes those of a part of the model again.
        shard: split parameters, gradients and optimizer state over the processes (FSDP2), by parts of the model.
        workers: processes that read image files; data in memory needs none.
    """

    epochs: int = 30
    iterations: int | None = None
    epoch_steps: int | None = None
    batch_size: int = 64
    optimizer: Optimizer | None = None
    lr: float | None = None
    lr_schedule: LrSchedule = "cosine"
    milestones: tuple[float, ...] = (0.5, 0.75)
    lr_decay: float = 0.1
    warm_up: float | None = None
    gate_lr: GateLr = "model"
    gate_lr_factor: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-4
    accumulate: int = 1
    seed: int = 0
    device: Device = "auto"
    mixed_precision: MixedPrecision = "no"
    compile: bool | None = None
    compile_mode: CompileMode = "default"
    compile_segments: bool = False
    checkpointing: bool = False
    shard: bool = False
    workers: int = 4

    def __post_init__(self) -> None:
        check_kinds(self)
        for name, example in (("milestones", "[0.5, 0.75]"), ("betas", "[0.9, 0.999]")):
            require_numbers(name, getattr(self, name), example)
            object.__setattr__(self, name, tuple(float(number) for number in getattr(self, name)))
        for name in ("epochs", "iterations", "epoch_steps", "batch_size", "accumulate"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
        if self.shard and (self.compile or self.mixed_precision == "fp16"):
            other = "compile" if self.compile else "mixed_precision='fp16'"
            raise ConfigError(
                f"shard with {other} is not possible: torch's hooks that gather weights end a compiled graph, and its "
                "scaler of losses sees only one process's shards. Leave out one of the two, or write "
                "compile_segments or bf16"
            )
        if self.compile and self.compile_segments:
            raise ConfigError(
                "compile compiles the whole model and compile_segments its parts: leave out one of the two"
            )
        if self.compile_mode != "default" and not self.compile:
            raise ConfigError(f"compile_mode={self.compile_mode!r} changes nothing without compile")
        if self.workers < 0:
            raise ConfigError(f"workers={self.workers} must be at least 0")
        _check_seed("seed", self.seed)
        self._check_rates()

    def optimizer_for(self, task: str) -> Optimizer:
        """The optimizer, by default that of a task (``classification`` or ``language``)."""
        return self.optimizer or ("sgd" if task == "classification" else "adamw")

    def _check_rates(self) -> None:
        for name in ("lr", "gate_lr_factor", "lr_decay", "eps"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name}={value} must be above 0 and finite")
        if not 0 <= self.weight_decay < float("inf"):
            raise ConfigError(f"weight_decay={self.weight_decay} must be at least 0 and finite")
        rising = all(a < b for a, b in zip((0.0, *self.milestones), (*self.milestones, 1.0), strict=True))
        if not rising:
            raise ConfigError(
                f"milestones={self.milestones} must be shares of the run, each larger than the one before and all "
                "between 0 and 1: epochs 80 and 120 of 160 are 0.5 0.75"
            )
        if self.warm_up is not None and not 0 <= self.warm_up < 1:
            raise ConfigError(f"warm_up={self.warm_up} must be a share of the run, from 0 to below 1")
        if self.lr_schedule == "inverse-sqrt" and not self.warm_up:
            raise ConfigError("lr_schedule='inverse-sqrt' falls from the end of the warm-up: give warm_up, e.g. 0.08")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas={self.betas} must be two numbers from 0 to below 1")


_OF_GATES = {name: getattr(TrainSettings, name) for name in ("gate_lr", "gate_lr_factor")}
"""The settings of the loop that only gated methods read, with their defaults."""


@dataclass(frozen=True)
class RunSettings:
    """Settings of a whole run: model, data, training loop and method.

    Attributes:
        model: ``timm:NAME``, ``hf:TYPE``, ``zoo:NAME`` or ``FILE.py:FUNCTION``.
        data: ``digits``, ``pydoc``, ``cifar10``, ``cifar100``, ``imagenet``, ``wikitext103``, ``text`` (words) or
            ``characters``.
        data_dir: folder of the data set's files; ``cifar10``, ``cifar100`` and ``wikitext103`` can be downloaded.
        image_size: side of the images; by default a size that suits the model.
        block_length: words in a sample of text, or characters (``pydoc`` and ``characters``).
        augment: augmentation of training images: ``crop-flip`` (CIFAR's default), ``timm`` (ImageNet's) or ``none``.
        subset: at most this many training and test samples, with the same share of each class.
        test_subset: at most this many test samples; by default ``subset``.
        setting: ``standard``; ``adaptation``: pre-train in float on one half of the classes, then train on the other;
            ``fine-tuning``: pre-train in float on one half of the training samples, then train on the other.
        pretrain_epochs: epochs of that pre-training; by default those of the loop.
        split_seed: seed that draws the samples of a subset, and the classes and samples of a half.
        recipe: name of the paper's run from which the settings start (``fractrain zoo list``).
        train: settings of the loop.
        frac: settings of the method; its ``run.length`` is that of the loop.
    """

    model: str = "timm:resnet10t"
    data: str = "digits"
    data_dir: str | None = None
    image_size: int | None = None
    block_length: int = 64
    augment: Augmentation | None = None
    subset: int | None = None
    test_subset: int | None = None
    setting: Setting = "standard"
    pretrain_epochs: int | None = None
    split_seed: int = 0
    recipe: str | None = None
    train: TrainSettings = field(default_factory=TrainSettings)
    frac: FracConfig = field(default_factory=FracConfig)

    def __post_init__(self) -> None:
        check_kinds(self)
        if self.image_size is not None and self.image_size < 1:
            raise ConfigError(f"image_size={self.image_size} must be at least 1: the side of the images in pixels")
        if self.frac.run.length is not None and self.frac.run.epochs is None:
            raise ConfigError(
                f"run.length={str(self.frac.run.length)!r} is for loops of your own: epochs or iterations set it here"
            )
        object.__setattr__(self, "frac", self.frac.replace(**{"run.length": self.train.epochs}))
        for name in ("subset", "test_subset"):
            number = getattr(self, name)
            if number is not None and number < 2:
                raise ConfigError(f"{name}={number} leaves too few samples: write 2 or more")
        if self.pretrain_epochs is not None and (self.setting == "standard" or self.pretrain_epochs < 1):
            raise ConfigError(
                f"pretrain_epochs={self.pretrain_epochs}: write 1 or more, with setting adaptation or fine-tuning"
            )
        refuse_unread(self)
        if self.frac.gated and self.frac.gate.gradient == "fisher" and self.train.mixed_precision == "fp16":
            raise ConfigError(
                "gate.gradient='fisher' squares gradients, and mixed_precision='fp16' scales them: write "
                "mixed_precision='bf16', or gate.gradient='straight-through'"
            )
        _check_seed("split_seed", self.split_seed)

    @property
    def pretraining(self) -> RunSettings:
        """The settings of the pre-training in float: those that it reads, for its own number of epochs."""
        loop = replace(self.train, **_OF_GATES)
        if self.pretrain_epochs is not None:
            loop = replace(loop, epochs=self.pretrain_epochs, iterations=None)
        plain = FracConfig(method="float", run=RunConfig(batch_axis=self.frac.run.batch_axis))
        return replace(self, train=loop, frac=plain)

    @property
    def number_format(self) -> str:
        """The recipe or the number format by name; empty for ``affine``, the usual one."""
        format, recipe = self.frac.format, self.frac.recipe
        return "" if format == "affine" else recipe if isinstance(recipe, str) else format

    def to_dict(self) -> dict[str, Any]:
        """One mapping with the names of the command-line flags, and a mapping for each group of the configuration."""
        rest = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("train", "frac")}
        frac = {flat_name(FracConfig, name): value for name, value in self.frac.to_dict().items()}
        del frac["run"]["length"]
        train = {f.name: getattr(self.train, f.name) for f in fields(self.train)}
        train |= {"milestones": list(self.train.milestones), "betas": list(self.train.betas)}
        return rest | frac | train

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunSettings:
        """Build from the result of ``to_dict``, or from some of its keys.

        With ``recipe`` the other keys start from the settings of that recipe instead of the defaults; where every key
        is given, as ``to_dict`` does, nothing is left to it.

        Raises:
            ConfigError: a name is unknown (the message has near names), or a value has no meaning.
        """
        parts = (cls, TrainSettings, FracConfig)
        names = [{flat_name(part, f.name): f.name for f in fields(part)} for part in parts]
        for nested in ("train", "frac"):
            del names[0][nested]
        known = set().union(*names)
        if not known <= values.keys():
            values = from_recipe(values)
        for key in values:
            if key not in known:
                raise ConfigError(f"a run has no setting {key!r}.{near(str(key), sorted(known))}")
        rest, train, frac = ({part[key]: value for key, value in values.items() if key in part} for part in names)
        config = FracConfig.from_dict(frac)
        return cls(**rest, train=TrainSettings(**train), frac=config)

    def to_yaml(self, path: Path) -> None:
        """Write as YAML, which ``fractrain train --config`` reads."""
        write_yaml(path, self.to_dict())

    @classmethod
    def from_yaml(cls, path: Path) -> RunSettings:
        """Read a file that ``to_yaml`` wrote."""
        return cls.from_dict(read_yaml(path))


def flat_name(part: type, name: str) -> str:
    """The name of a field among all settings of a run, where ``recipe`` names the paper's run to start from."""
    return "format_recipe" if part is FracConfig and name == "recipe" else name


def _check_seed(name: str, seed: int) -> None:
    if not 0 <= seed < _SEEDS:
        raise ConfigError(f"{name}={seed} must be at least 0 and below {_SEEDS} (2**32)")


def identity(config: Mapping[str, Any], processes: int) -> dict[str, Any]:
    """The settings that decide the numbers of a run on so many processes."""
    settings: dict[str, Any] = {"processes": processes}
    for key, value in config.items():
        if key not in _NO_MATTER:
            parts = value.items() if isinstance(value, Mapping) else ()
            settings |= {f"{key}.{part}": setting for part, setting in parts} or {key: value}
    return settings
