"""Everything a training run is asked to do, as plain frozen values that one YAML file holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from fractrain_fx.config import FracConfig
from fractrain_fx.errors import ConfigError, near

__all__ = ["RunSettings", "TrainSettings"]

Optimizer = Literal["sgd", "adamw"]
MixedPrecision = Literal["no", "fp16", "bf16"]
Device = Literal["auto", "cpu", "cuda", "mps"]


@dataclass(frozen=True)
class TrainSettings:
    """The loop.

    Attributes:
        epochs: length of the run.
        batch_size: samples of a batch in one process.
        optimizer: ``sgd`` (momentum 0.9) or ``adamw``; by default the first for classification, else the second.
        lr: peak learning rate, reached after the first epoch and lowered along a cosine; by default 0.1 for ``sgd``
            and 0.003 for ``adamw``.
        weight_decay: 1e-4 as in the paper.
        accumulate: batches whose gradients make one optimizer step.
        seed: of weights, order of samples and rounding noise.
        device: ``auto`` (what accelerate finds), ``cpu``, ``cuda`` or ``mps``.
        mixed_precision: ``no``, ``fp16`` or ``bf16``, for what is not quantized.
        compile: use ``torch.compile``.
    """

    epochs: int = 30
    batch_size: int = 64
    optimizer: Optimizer | None = None
    lr: float | None = None
    weight_decay: float = 1e-4
    accumulate: int = 1
    seed: int = 0
    device: Device = "auto"
    mixed_precision: MixedPrecision = "no"
    compile: bool = False

    def __post_init__(self) -> None:
        for name, known in (("device", Device), ("mixed_precision", MixedPrecision), ("optimizer", Optimizer)):
            value = getattr(self, name)
            if value not in get_args(known) and not (name == "optimizer" and value is None):
                raise ConfigError(f"{name}={value!r} is unknown: write one of {', '.join(get_args(known))}")
        for name in ("epochs", "batch_size", "accumulate"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if (self.lr is not None and not self.lr > 0) or not self.weight_decay >= 0:
            raise ConfigError(f"lr={self.lr} must be above 0 and weight_decay={self.weight_decay} at least 0")


@dataclass(frozen=True)
class RunSettings:
    """A whole run: what is trained, on what, in which precision, and how.

    Attributes:
        model: ``timm:NAME``, ``hf:TYPE``, ``zoo:NAME`` or ``FILE.py:FUNCTION``.
        data: ``digits`` or ``pydoc``.
        image_size: side of the images; by default what suits the model.
        block_length: characters in a sample of text.
        limit: at most this many training and test samples.
        train: the loop.
        frac: the method; its ``epochs`` are those of the loop.
    """

    model: str = "timm:resnet10t"
    data: str = "digits"
    image_size: int | None = None
    block_length: int = 64
    limit: int | None = None
    train: TrainSettings = field(default_factory=TrainSettings)
    frac: FracConfig = field(default_factory=FracConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "frac", self.frac.replace(epochs=self.train.epochs))
        if self.limit is not None and self.limit < 2:
            raise ConfigError(f"limit={self.limit} leaves too few samples: write 2 or more")

    def to_dict(self) -> dict[str, Any]:
        """One flat mapping with the names of the command's flags."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("train", "frac")}
        train = {f.name: getattr(self.train, f.name) for f in fields(self.train)}
        return own | self.frac.to_dict() | train

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunSettings:
        """Build from what ``to_dict`` gives.

        Raises:
            ConfigError: an unknown name (near names are offered) or a value without meaning.
        """
        names = [{f.name for f in fields(each)} - {"train", "frac"} for each in (cls, TrainSettings, FracConfig)]
        for key in values:
            if key not in set().union(*names):
                raise ConfigError(f"a run has no setting {key!r}.{near(key, sorted(set().union(*names)))}")
        own, train, frac = ({key: value for key, value in values.items() if key in known} for known in names)
        config = FracConfig.from_dict(frac | {"epochs": train.get("epochs", TrainSettings.epochs)})
        return cls(**own, train=TrainSettings(**train), frac=config)

    def to_yaml(self, path: Path) -> None:
        """Write as YAML, which ``fractrain train --config`` reads."""
        import yaml

        path.write_text(yaml.safe_dump(self.to_dict(), sort_keys=False), encoding="utf-8")

    @classmethod
    def from_yaml(cls, path: Path) -> RunSettings:
        """Read what ``to_yaml`` wrote."""
        import yaml

        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"{path} could not be read as YAML: {error}") from error
        if not isinstance(values, Mapping):
            raise ConfigError(f"{path} holds no settings: write lines like 'method: fractrain'")
        return cls.from_dict(values)
