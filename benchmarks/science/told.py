"""Measures how a block's bits change the loss of a trained model, beside what each gradient tells the block's gate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from benchmarks.page import markdown_table
from benchmarks.science.fixed import given, options_of
from fractrain_fx import FracModel
from fractrain_fx.config import GateGradient
from fractrain_fx.errors import ConfigError
from fractrain_fx.nn.quantizers import ActivationQuantizer
from fractrain_fx.training import RunSettings, Trainer, build_trainer, resume_run
from fractrain_fx.training.data.loader import Share, make_loader

__all__ = ["Mean", "Told", "told", "told_table"]

_BATCH = 250


class Mean(NamedTuple):
    """Means over the samples, for each block and option, and their standard errors."""

    value: Float[Tensor, "blocks options"]
    error: Float[Tensor, "blocks options"]

    @classmethod
    def of(cls, samples: Float[Tensor, "blocks samples options"]) -> Mean:
        """The means of changes from the last option."""
        changes = (samples - samples[..., -1:])[..., :-1]
        return cls(changes.mean(1), changes.std(1) / changes.shape[1] ** 0.5)


class Told(NamedTuple):
    """Changes of the loss, in nats, from the last option to each other one, in one block at a time.

    Attributes:
        blocks: names of the rows.
        options: names of the columns.
        measured: the block computes at that option for all samples, the others as they choose.
        told: what the gradient of the choices says instead, for each kind of gradient; a sample that skips the block
            says nothing.
    """

    blocks: tuple[str, ...]
    options: tuple[str, ...]
    measured: Mean
    told: dict[str, Mean]


def told(folder: Path, samples: int = 2000) -> Told:
    """Measure it on augmented training samples, in evaluation mode, for the options of a finished run that round.

    Args:
        folder: of the run.
        samples: how many, in whole batches of up to 250.

    Raises:
        ConfigError: the run's method has no gates.
    """
    trainer = resume_run(folder)
    if not trainer.model.frac_config.gated:
        raise ConfigError(f"{folder} is a run of method {trainer.model.frac_config.method!r}, which has no gates")
    batches = _batches(trainer, samples)
    options = trainer.model.frac_config.gate_options
    rounding = [number for number, option in enumerate(options) if not option.skips]
    with torch.no_grad():
        own = options_of(trainer.model.eval(), [inputs for inputs, _ in batches])
        found = torch.zeros(*own.shape, len(rounding))
        for block in range(len(own)):
            for column, number in enumerate(rounding):
                forced = own.clone()
                forced[block] = number
                with given(trainer.model, forced):
                    found[block, :, column] = torch.cat([_losses(trainer.model, *batch) for batch in batches])
    runs = ~torch.tensor([option.skips for option in options])[own]
    said = {
        kind: _said(folder, trainer.model, kind, batches)[..., rounding] / runs.float().mean(1).view(-1, 1, 1)
        for kind in get_args(GateGradient)
    }
    return Told(
        tuple(trainer.model.cost.choice),
        tuple(str(options[number]) for number in rounding[:-1]),
        Mean.of(found),
        {kind: Mean.of(each) for kind, each in said.items()},
    )


def told_table(found: Told) -> str:
    """A row for each block and option in thousandths of a nat, and how the means correlate with the measured ones."""
    columns = [found.measured, *found.told.values()]
    rows = [
        (
            *(block, option),
            *(_cell(each.value[row, column], each.error[row, column]) for each in columns),
        )
        for row, block in enumerate(found.blocks)
        for column, option in enumerate(found.options)
    ]
    table = markdown_table(("block", "option", "measured", *found.told), rows, text_columns=2)
    likeness = (f"{kind} {_correlation(found.measured.value, each.value):.2f}" for kind, each in found.told.items())
    return f"{table}\n\ncorrelation with the measured means: {', '.join(likeness)}"


def _take_state(model: FracModel, trained: FracModel) -> None:
    """Load the state of a model with another gradient: under `fisher` ops that read the same values share no range."""
    model.load_state_dict(trained.state_dict(), strict=False)
    ranges = dict(_quantizers(trained))
    for source, quantizer in _quantizers(model):
        model.get_submodule(quantizer).load_state_dict(trained.get_submodule(ranges[source]).state_dict())


def _quantizers(model: FracModel) -> Iterator[tuple[str, str]]:
    """The name of what each activation quantizer reads, and its own."""
    for node in model.graph_module.graph.nodes:
        if node.op == "call_module" and isinstance(model.get_submodule(node.target), ActivationQuantizer):
            yield str(node.args[0]), node.target


def _cell(mean: Tensor, error: Tensor) -> str:
    return f"{1e3 * mean:.1f} ± {1e3 * error:.1f}" if mean.isfinite() else "all skip"


def _correlation(measured: Tensor, said: Tensor) -> float:
    """Over the blocks that some sample runs."""
    runs = said.isfinite()
    return float(torch.corrcoef(torch.stack([measured[runs], said[runs]]))[0, 1])


def _batches(trainer: Trainer, samples: int) -> list[tuple[Tensor, Tensor]]:
    size = min(_BATCH, samples, len(trainer.data.train))
    loader = make_loader(trainer.data, Share(size, 0, torch.device("cpu")))
    return list(islice(loader.train(0, loader.steps), samples // size))


def _losses(model: FracModel, inputs: Tensor, targets: Tensor) -> Float[Tensor, " batch"]:
    """The loss of each sample; for texts the mean over its tokens."""
    logits = model(inputs)
    each = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    return each.view(len(targets), -1).mean(1)


def _said(
    folder: Path, trained: FracModel, kind: GateGradient, batches: list[tuple[Tensor, Tensor]]
) -> Float[Tensor, "blocks samples options"]:
    """The gradient of each sample's own loss in every option of every block."""
    settings = RunSettings.from_yaml(folder / "config.yaml")
    gate = replace(settings.frac.gate, gradient=kind)
    config = settings.frac.replace(gate=gate, execution="simulate", kernels="auto", skip_threshold=None)
    model = build_trainer(replace(settings, frac=config)).model
    _take_state(model, trained)
    model.eval()
    parts = []
    for inputs, targets in batches:
        losses = _losses(model, inputs, targets)
        grads = torch.autograd.grad(losses.mean(), list(model.cost.choice.values()))
        parts.append(len(targets) * torch.stack(grads))
    return torch.cat(parts, dim=1)
