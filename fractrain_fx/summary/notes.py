"""Facts about a recording and about how it runs, below the table."""

from __future__ import annotations

from collections.abc import Iterator

from fractrain_fx.config import CODE_BITS, SCALE_BITS
from fractrain_fx.config.products import PRODUCTS
from fractrain_fx.execution.codes.timing import lacks_products
from fractrain_fx.execution.torchao_kernels import Kernel, kernel_of, slow
from fractrain_fx.model import FracModel
from fractrain_fx.native.choice import kernel_devices
from fractrain_fx.passes import fixed_batch, not_on_int8, not_on_torchao, undispatched
from fractrain_fx.passes.analyse.sequence_first import sequence_first_parts

__all__ = ["notes_of"]


def notes_of(model: FracModel) -> Iterator[str]:
    """The facts, one a line."""
    if not model.checked:
        yield "the recording was not compared with the model: check=False, or tensors without data (meta)"
    if fixed_batch(model.graph_module):
        yield (
            "runs at one batch size only: the MACs of a sample are those of the recorded call over its batch size"
            + (", and the gates choose once for the whole batch" if model.frac_config.gated else "")
            + _sequence_first(model)
        )
    yield from _tied(model)
    device = next(model.parameters()).device.type
    rounding = model._state.rounding
    devices = kernel_devices(model.frac_config) if model.frac_config.format == "affine" else ()
    by_triton = device == "cuda" and device in devices
    if rounding.asked in ("cuda", "cpu", "codes", "codes-always") and device != "cpu" and not by_triton:
        yield f"run.backend={rounding.asked!r} changes nothing here: this model is on {device!r}"
    elif rounding.asked == "cuda" and device == "cpu":
        yield "run.backend='cuda' changes nothing here: it is for GPUs, and this model is on 'cpu'"
    elif rounding.reason and device == rounding.device:
        yield str(rounding)
    config = model.frac_config
    if config.affine.gradient_bits == "needed":
        yield "each sample's gradient takes the bits that it needs: a step costs less than is said here"
    pinned = [pin.product_recipe for pin in config.pins if pin.stages[0].fw <= CODE_BITS]
    recipes = [config.product_recipe, *pinned] if config.method != "float" else []
    for name in dict.fromkeys(name for recipe in recipes if recipe is not None for name in recipe.formats):
        yield f"format {name}: scales take {SCALE_BITS[name]}, which costs leave out"
    if model.frac_config.dispatches:
        yield from _dispatched(model)
    if model.frac_config.may_use_codes:
        yield from _lowered(model)
    if model.frac_config.run.torchao:
        yield from _by_torchao(model)


def _sequence_first(model: FracModel) -> str:
    parts = sequence_first_parts(model._state.original) if model.frac_config.run.batch_axis == 0 else []
    if not parts:
        return ""
    return f"; {parts[0]} takes sequence-first inputs: if dimension 1 has the samples, set run.batch_axis=1"


def _tied(model: FracModel) -> Iterator[str]:
    recordings = model._state.variants
    ties = {str(guard): guard for guards in recordings.first.recording.guards.values() for guard in guards.ties}
    for condition, guard in ties.items():
        yield f"recorded for {condition}: {guard.place}; for calls that do not meet it the model is recorded again"
    rest = len(model.guards) - len(ties)
    if rest:
        yield f"{rest} more conditions on sizes held in every call so far: model.guards lists them"


def _dispatched(model: FracModel) -> Iterator[str]:
    reasons = undispatched(model._state.recording.train)
    skippable = sum(block.gated and block.skip is not None for block in model.blocks)
    if skippable:
        yield f"{skippable - len(reasons)} of {skippable} blocks with a skip path leave out the samples that skip them"
    else:
        yield "no block of this model has a skip path, so run.skipping changes nothing"
    for name, reason in reasons.items():
        yield f"runs for all samples, also those that skip it: {name}: {reason}"


def _lowered(model: FracModel) -> Iterator[str]:
    reasons = not_on_int8(model._state.recording.train, model.frac_config)
    quantized = len(model.kernels())
    lacking = lacks_products(next(model.parameters()).device)
    here = f", but not here: {lacking}" if lacking else ""
    yield f"{quantized - len(reasons)} of {quantized} quantized ops may multiply on int8{here}"
    yield from _by_reason("multiplies in float", reasons)


def _by_torchao(model: FracModel) -> Iterator[str]:
    config, weight = model.frac_config, next(model.parameters())
    reasons = not_on_torchao(model._state.recording.train, config)
    quantized = len(model.kernels())
    yield f"{quantized - len(reasons)} of {quantized} quantized ops may be multiplied by torchao"
    for stage in dict.fromkeys(config.precision_stages):
        kernels = [
            kernel_of(config.product_recipe, product, stage, weight.device, weight.dtype) for product in PRODUCTS
        ]
        words = [str(kernel) if isinstance(kernel, Kernel) else f"simulated: {kernel}" for kernel in kernels]
        parts = dict(zip(PRODUCTS, words, strict=True)).items() if len(set(words)) > 1 else [("all products", words[0])]
        yield f"{stage}: " + "; ".join(f"{product.replace('_', ' ')}: {text}" for product, text in parts)
        for kind in {kernel.kind for kernel in kernels if isinstance(kernel, Kernel) and kernel.emulated is None}:
            if (reason := slow(kind, weight.device)) is not None:
                yield f"{stage} saves no time here: {reason}"
    yield from _by_reason("simulated in float", reasons)


def _by_reason(what: str, reasons: dict[str, str]) -> Iterator[str]:
    """A line for each reason, with some of its ops."""
    for reason in dict.fromkeys(reasons.values()):
        names = [name for name, why in reasons.items() if why == reason]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield f"{what}: {', '.join(names[:3])}{more}: {reason}"
