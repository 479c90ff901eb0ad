"""Which layers a trainer runs in low precision, and which stay in bf16, under a budget."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fractrain_fx.config.precision import Precision
from fractrain_fx.durable import write_text
from fractrain_fx.errors import ConfigError, near
from fractrain_fx.numerics.allocation import allocate
from fractrain_fx.numerics.sensitivity import MeasuredOp, Sensitivities, Sensitivity
from fractrain_fx.numerics.sensitivity.rounded import OPERANDS
from fractrain_fx.numerics.trainers import writers

__all__ = ["TRAINERS", "LayerPrecisions", "layer_precisions"]

_FP4, _FP8, _BF16 = Precision(4, 4), Precision(8, 8), Precision(16, 16)
_WORDS: Mapping[Precision, writers.Word] = {_FP4: "fp4", _FP8: "fp8", _BF16: "bf16"}
_MULTIPLE = 16

# The names that trainers give to layers of Hugging Face's LLaMA and GPT-2. Any other layer keeps its name.
_MEGATRON: Mapping[str, str] = {
    r"model\.layers\.(\d+)\.self_attn\.[qkv]_proj": r"decoder.layers.\1.self_attention.linear_qkv",
    r"model\.layers\.(\d+)\.self_attn\.o_proj": r"decoder.layers.\1.self_attention.linear_proj",
    r"model\.layers\.(\d+)\.mlp\.(gate|up)_proj": r"decoder.layers.\1.mlp.linear_fc1",
    r"model\.layers\.(\d+)\.mlp\.down_proj": r"decoder.layers.\1.mlp.linear_fc2",
    r"transformer\.h\.(\d+)\.attn\.c_attn": r"decoder.layers.\1.self_attention.linear_qkv",
    r"transformer\.h\.(\d+)\.attn\.c_proj": r"decoder.layers.\1.self_attention.linear_proj",
    r"transformer\.h\.(\d+)\.mlp\.c_fc": r"decoder.layers.\1.mlp.linear_fc1",
    r"transformer\.h\.(\d+)\.mlp\.c_proj": r"decoder.layers.\1.mlp.linear_fc2",
    r"lm_head": "output_layer",
}
"""Megatron-core multiplies queries, keys and values in one layer, and gate and up projection in one."""

_TORCHTITAN: Mapping[str, str] = {
    r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj": r"layers.\1.attention.qkv_linear.w\2",
    r"model\.layers\.(\d+)\.self_attn\.o_proj": r"layers.\1.attention.wo",
    r"model\.layers\.(\d+)\.mlp\.gate_proj": r"layers.\1.feed_forward.w1",
    r"model\.layers\.(\d+)\.mlp\.down_proj": r"layers.\1.feed_forward.w2",
    r"model\.layers\.(\d+)\.mlp\.up_proj": r"layers.\1.feed_forward.w3",
}


@dataclass(frozen=True)
class ForeignTrainer:
    """What a trainer can do with a layer; ``write`` gives the text of its file, ``names`` its names for layers.

    It can run ops of these ``kinds``, all with a weight, in the low precisions ``low``.
    """

    write: Callable[[LayerPrecisions], str]
    kinds: tuple[str, ...] = ("linear",)
    low: tuple[Precision, ...] = (_FP8,)
    names: Mapping[str, str] = field(default_factory=dict)


_MATRICES = ("linear", "addmm")
TRAINERS: Mapping[str, ForeignTrainer] = {
    "torchtitan": ForeignTrainer(writers.torchtitan, names=_TORCHTITAN),
    "megatron": ForeignTrainer(writers.megatron, _MATRICES, (_FP4, _FP8), _MEGATRON),
    "transformer-engine": ForeignTrainer(writers.transformer_engine, _MATRICES, (_FP4, _FP8)),
    "torchao": ForeignTrainer(writers.torchao),
}
"""The trainers that a file can be written for."""


@dataclass(frozen=True)
class LayerPrecisions:
    """The precision of each layer of a model in a trainer.

    Attributes:
        trainer: its name.
        layers: ``fp4``, ``fp8`` or ``bf16`` by the trainer's name of the layer.
        fixed: why layers among these stay in bf16 whatever the budget is.
        cost, budget: ``cp_total`` in per cent.
        harm: the expected change of the loss.
        formats: the number formats in which it was measured.
    """

    trainer: str
    layers: Mapping[str, writers.Word]
    fixed: Mapping[str, str]
    cost: float
    budget: float
    harm: float
    formats: tuple[str, ...]

    def having(self, *words: writers.Word) -> list[str]:
        """The layers of some precisions."""
        return [name for name, word in self.layers.items() if word in words]

    def write(self, path: str | Path) -> None:
        """Write the trainer's file.

        Raises:
            ConfigError: its rules cannot tell these layers apart, or no layer is in low precision.
        """
        if not self.having("fp4", "fp8"):
            raise ConfigError(
                f"every layer stays in bf16 for {self.trainer}, so there is nothing to write: give a smaller budget "
                f"(all in bf16 costs {self.cost:.4g})"
            )
        write_text(Path(path), TRAINERS[self.trainer].write(self))

    def __str__(self) -> str:
        counts = ", ".join(f"{len(self.having(word))} {word}" for word in ("fp4", "fp8", "bf16") if self.having(word))
        return (
            f"{self.trainer}: {counts}; costs {self.cost:.4g} of {self.budget:.4g} % of training at 32 bits; expected "
            f"change of the loss {self.harm:.3g}"
        )


def layer_precisions(found: Sensitivities, budget: float | Precision | str, trainer: str) -> LayerPrecisions:
    """Choose low precision or bf16 for each layer, exactly as :func:`fractrain_fx.allocate` does.

    Such trainers have no other widths: 8 bits, for some also 4, or bf16. bf16 costs 16 bits and counts as harmless. Ops
    that the trainer cannot convert, and those that training here leaves in float, are in bf16.

    Args:
        found: the sensitivities at 8 bits; if all have them at 4 bits too, a trainer that has these may choose them.
        budget: ``cp_total`` in per cent, or a precision that stands for what it costs everywhere.
        trainer: one of ``TRAINERS``.

    Raises:
        ConfigError: the trainer is unknown, 8 bits were not measured, no layer can be converted, or the budget is below
            what low precision everywhere costs.
    """
    if trainer not in TRAINERS:
        raise ConfigError(
            f"trainer {trainer!r} is unknown: write one of {', '.join(TRAINERS)}.{near(trainer, TRAINERS)}"
        )
    able = TRAINERS[trainer]
    reasons = {op.name: reason for op in found.ops if (reason := _unfit(op, able)) is not None}
    layers, merged = _merged(found, able, reasons)
    if not layers.measured:
        raise ConfigError(f"{trainer} can convert no layer of this model: {'; '.join(dict.fromkeys(reasons.values()))}")
    low = [bits for bits in able.low if all(bits.fw in layers.widths(op.name) for op in layers.measured)]
    if _FP8 not in low:
        raise ConfigError("8 bits were not measured: write precisions=[..., 8] in sensitivity()")
    chosen = allocate(layers, budget, options=[*low, _BF16])
    return LayerPrecisions(
        trainer,
        dict.fromkeys(merged, _WORDS[_BF16]) | {name: _WORDS[bits] for name, bits in chosen.precisions.items()},
        merged,
        chosen.cost,
        chosen.budget,
        chosen.harm,
        tuple(dict.fromkeys(op.format for op in layers.measured)),
    )


def _unfit(op: MeasuredOp, trainer: ForeignTrainer) -> str | None:
    """Why a trainer leaves an op in bf16 whatever the budget is."""
    if not op.weight or op.kind not in trainer.kinds:
        return "not a layer that it converts"
    if op.fixed is not None:
        return "not measured, because it is float in training here"
    sides = (op.product.inputs, op.product.outputs) if op.product is not None else ()
    if any(side % _MULTIPLE for side in sides):
        return f"its sizes are not multiples of {_MULTIPLE}"
    return None


def _merged(
    sensitivities: Sensitivities, trainer: ForeignTrainer, reasons: Mapping[str, str]
) -> tuple[Sensitivities, dict[str, str]]:
    """The sensitivities of the trainer's layers, of which each may be several ops, and why some stay in bf16."""
    groups: dict[str, list[MeasuredOp]] = {}
    for op in sensitivities.ops:
        layer = op.kind in trainer.kinds and op.weight
        groups.setdefault(_renamed(_layer(op), trainer.names) if layer else op.name, []).append(op)
    ops, rows, fixed = [], [], {}
    for name, members in groups.items():
        reason = next((reasons[op.name] for op in members if op.name in reasons), None)
        macs = [sum(counts) for counts in zip(*(op.macs for op in members), strict=True)]
        width = None if reason is None else _BF16.fw
        ops.append(replace(members[0], name=name, module=name, macs=(macs[0], macs[1], macs[2]), fixed=width))
        if reason is None:
            rows += _summed(sensitivities, name, members)
        elif members[0].kind in trainer.kinds and members[0].weight:
            fixed[name] = reason
    return replace(sensitivities, ops=tuple(ops), rows=tuple(rows)), fixed


def _summed(sensitivities: Sensitivities, name: str, members: Sequence[MeasuredOp]) -> list[Sensitivity]:
    shared = [
        bits
        for bits in sensitivities.widths(members[0].name)
        if all(bits in sensitivities.widths(op.name) for op in members)
    ]
    rows = []
    for operand in OPERANDS:
        for bits in shared:
            parts = [sensitivities.of(op.name, operand, bits) for op in members]
            change, noise = (sum(getattr(part, kind) or 0.0 for part in parts) for kind in ("change", "noise"))
            rows.append(Sensitivity(name, operand, bits, change=change, noise=noise))
    return rows


def _layer(op: MeasuredOp) -> str:
    """The module of a layer's op: a layer that is called twice has two ops, of which one has a number in its name."""
    return op.module if re.fullmatch(rf"{re.escape(op.module)}(_\d+)?", op.name) else op.name


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """A trainer's name for a layer."""
    for pattern, theirs in names.items():
        if (match := re.fullmatch(pattern, name)) is not None:
            return match.expand(theirs)
    return name
