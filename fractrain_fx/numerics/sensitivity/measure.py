"""``sensitivity``: what rounding each operand of each op to each width does to the loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from itertools import islice
from typing import Any

from torch import nn

from fractrain_fx.config import FracConfig
from fractrain_fx.config.precision import FULL, Precision
from fractrain_fx.config.products import Recipe
from fractrain_fx.config.recipes import named, widths_of
from fractrain_fx.errors import ConfigError, InputError
from fractrain_fx.numerics.criterion import Criterion
from fractrain_fx.numerics.sensitivity.estimate import LEAST, Estimates
from fractrain_fx.numerics.sensitivity.float_copy import FloatCopy, fixed_by_rule
from fractrain_fx.numerics.sensitivity.result import MeasuredOp, Sensitivities, Sensitivity
from fractrain_fx.passes import Decision

__all__ = ["BATCHES", "sensitivity"]

BATCHES = 8
"""The batches that are measured, unless ``limit`` says otherwise."""

_WIDTHS = range(2, 9)


def sensitivity(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    criterion: Criterion | None = None,
    precisions: Sequence[int] | None = None,
    config: FracConfig | None = None,
    limit: int = BATCHES,
    seed: int = 0,
) -> Sensitivities:
    """Estimate what rounding each operand of each op to each width does to the loss, from a few passes over batches.

    A float copy of the model runs in training mode; the model itself does not change. Each batch takes two training
    steps' passes and two forward passes, for all ops and widths together.

    Args:
        model: a rewritten model of any method, whose formats and rules count; or any other model, with ``config``. Ops
            that a rule keeps in ``float`` or ``bfloat16`` are not measured.
        batches: ``(inputs, targets)`` with ``criterion``, else what the model takes with labels: a mapping of
            arguments, or a tuple of them. All are of one size, at least four.
        criterion: gets the model's output and the targets, and returns the mean loss, such as ``F.cross_entropy``.
        precisions: widths in bits; by default 2 to 8, as far as the number format has them.
        config: formats and rules for a model that was not rewritten; affine by default.
        limit: the most batches that are read.
        seed: of the noise with which gradients are rounded.

    Raises:
        ConfigError: a width is not one of the format's.
        InputError: there are too few batches, two of them have the same gradient, or there is no loss.
        ModelError: nothing of the model is rounded in training, or the loss does not depend on an op.
    """
    held = list(islice(iter(batches), limit))
    if len(held) < LEAST:
        raise InputError(
            f"{len(held)} batches do not show how much a gradient varies from batch to batch: give {LEAST} or more"
        )
    copied = FloatCopy(model, held[0], criterion, config)
    costs = {op.name: (op, cost) for op, cost in copied.costs}
    formats = {name: costs[name][0].precision.format or copied.config.format for name in copied.probes}
    recipes = {name: costs[name][0].precision.recipe_under(copied.config) for name in copied.probes}
    widths = {name: _widths(recipe, precisions) for name, recipe in recipes.items()}
    estimates = Estimates(copied, widths, held, seed)
    rules = {op.name: _rule(op.precision, measured=op.name in copied.probes) for op, _ in copied.costs}
    ops = tuple(
        MeasuredOp(
            name=op.name,
            kind=op.kind,
            module=op.module,
            macs=cost.macs,
            block=op.block,
            weight=cost.weight,
            least=cost.least,
            by_product=cost.by_product,
            format=formats.get(op.name, op.precision.format or "affine"),
            fixed=None if op.name in formats else 16 if rules[op.name] == "bfloat16" else 32,
            product=op.product,
            rule=rules[op.name],
        )
        for op, cost in copied.costs
    )
    return Sensitivities(
        ops,
        tuple(_rows(estimates, widths)),
        estimates.loss,
        len(held),
        type(copied.original).__name__,
        _settings(copied.config, set(formats.values())),
    )


def _rule(decision: Decision, *, measured: bool) -> str | Recipe | None:
    """What a rule has to say of an op besides its bits, so that the op trains as it was measured."""
    if measured:
        return decision.format if decision.recipe is None else named(decision.recipe)
    # Float are also ops without a form in which they could be measured, or could have the format of their rule.
    unlike_measured = decision.rounds or decision.format is not None
    return fixed_by_rule(decision) or ("float" if unlike_measured else None)


def _settings(config: FracConfig, formats: Set[str]) -> dict[str, Any]:
    """The settings of the formats that are not the usual ones, and a precision that the configuration's format has."""
    recipe, precisions = config.product_recipe, (Precision(8, 8), Precision(4, 4), FULL)
    fitting = next(precision for precision in precisions if recipe is None or widths_of(recipe, precision) is None)
    chosen, usual = config.replace(precision=fitting).to_dict(), FracConfig(method="static").to_dict()
    names = ["format", "recipe", "precision", "attention"]
    names += ["affine"] if "affine" in {config.format, *formats} else []
    return {name: chosen[name] for name in names if chosen[name] != usual[name]}


def _rows(estimates: Estimates, widths: dict[str, tuple[int, ...]]) -> Iterable[Sensitivity]:
    for op, options in widths.items():
        for operand in ("x", "w"):
            yield from (Sensitivity(op, operand, bits, change=estimates.change(op, operand, bits)) for bits in options)
        for bits in options:
            added, batch = estimates.variances(op, bits) or (None, None)
            yield Sensitivity(op, "g", bits, noise=estimates.noise(op, bits), variance=added, batch_variance=batch)


def _widths(recipe: Recipe | None, precisions: Sequence[int] | None) -> tuple[int, ...]:
    """The widths to measure in the number format of a recipe, or in one without."""
    if recipe is not None and len(set(recipe.formats)) > 1:
        raise ConfigError(
            f"sensitivity measures all products of an op in one number format, and the recipe has {recipe.formats}: "
            "give config= a recipe of one format"
        )
    if precisions is None:
        return tuple(bits for bits in _WIDTHS if recipe is None or widths_of(recipe, _both(bits)) is None)
    if not precisions:
        raise ConfigError("precisions is empty: write widths such as [4, 6, 8]")
    for bits in precisions:
        if not isinstance(bits, int) or not 2 <= bits <= 16:
            raise ConfigError(f"precisions has {bits!r}, and a width is 2 to 16 bits")
        if recipe is not None and (lacks := widths_of(recipe, _both(bits))) is not None:
            raise ConfigError(lacks)
    return tuple(dict.fromkeys(precisions))


def _both(bits: int) -> Precision:
    return Precision(bits, bits)
