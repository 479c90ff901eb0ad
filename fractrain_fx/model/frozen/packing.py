"""Keep frozen weights as codes of few bits instead of floats (``FracModel.pack_frozen``)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import nn
from torch.fx import Node

from fractrain_fx.capture import RecordedModule
from fractrain_fx.config.precision import Precision
from fractrain_fx.errors import ConfigError, ModelError
from fractrain_fx.formats import AffineFormat
from fractrain_fx.model.by_segment import BySegment
from fractrain_fx.model.frozen.adapter import save_adapter
from fractrain_fx.model.state import ModelState
from fractrain_fx.nn.bits import StageBits, stage_of
from fractrain_fx.nn.frozen_weight import FrozenWeight
from fractrain_fx.nn.quantizers import WeightQuantizer
from fractrain_fx.passes import ops_of
from fractrain_fx.passes.analyse.codable import Codable, Readers, codable, readers_of

__all__ = ["CODES", "Packable", "PackedWeights", "pack", "require_form", "require_stage", "unpack"]

CODES = ".frozen.codes"
"""How the names of codes in a checkpoint end, behind the path of the quantizer."""

_CLOSED = (
    "A model whose frozen weights are codes is not recorded again, because that would compare it with floats that are "
    "gone: call the model once on such a batch, and cast it, before pack_frozen()"
)


@dataclass(frozen=True)
class PackedWeights:
    """What :meth:`fractrain_fx.FracModel.pack_frozen` did with the parameters that are not trained.

    Attributes:
        bits: width of the codes of each packed weight, by the parameter's name.
        left: the parameters that stay as they are, with the reason.
        packed_bytes: bytes of codes and ranges.
        left_bytes: bytes of the parameters that stay.
        float32_bytes: bytes that all of these parameters would have in float32.
    """

    bits: Mapping[str, int]
    left: Mapping[str, str]
    packed_bytes: int
    left_bytes: int
    float32_bytes: int

    @property
    def share(self) -> float:
        """Bytes of all frozen parameters as a share (0..1) of those in float32."""
        return (self.packed_bytes + self.left_bytes) / self.float32_bytes

    def __str__(self) -> str:
        counts = sorted(Counter(self.bits.values()).items())
        kinds = ", ".join(f"{count} {'weight' if count == 1 else 'weights'} of {bits} bits" for bits, count in counts)
        reasons = Counter(self.left.values())
        return "\n".join(
            [
                f"{kinds} as codes ({self.packed_bytes:,} bytes), {len(self.left)} parameters as they were "
                f"({self.left_bytes:,} bytes): {self.share:.3f} of float32",
                *(f"  left: {count} {reason}" for reason, count in reasons.items()),
            ]
        )


class Packable(BySegment):
    """The part of :class:`fractrain_fx.FracModel` that keeps frozen weights as codes."""

    def pack_frozen(self) -> PackedWeights:
        """Round the weights that are not trained once, and keep their codes and ranges instead of floats.

        Outputs and gradients stay the same bit for bit. A 4-bit weight takes half a byte a value. Call it when the
        weights are loaded, and the model has its device and type, before optimizer and ``fully_shard`` are made.
        ``state_dict`` then has ``frac.*.frozen.codes`` instead of such a weight. :meth:`restore` puts the rounded
        values back as float parameters.

        Returns:
            Which weights were packed, which were not and why, and the bytes of both.

        Raises:
            ConfigError: the configuration does not round weights in format ``affine`` at one width of at most 8 bits.
            ModelError: no frozen weight can be packed, or one is not finite, or the model is sharded or has codes.
        """
        return pack(self._state)

    def save_adapter(self, directory: str | Path, *, base: str | None = None) -> None:
        """Write the adapters of a PEFT model, with the base's name and the widths to which its weights were rounded.

        The folder is one of PEFT's; ``README.md`` and ``fractrain_fx.json`` in it say how the base was rounded.

        Args:
            directory: made if it does not exist.
            base: the name of the base model, if PEFT does not know it.

        Raises:
            ModelError: the model has no adapters of PEFT.
            ConfigError: the base's name is not known.
        """
        config, bits, stage = self.frac_config, {}, stage_of(self)
        for op in (op for _, op in ops_of(self._state.recording.train.graph) if not op.weight_gradient):
            if op.precision.rounds:
                now, fixed = op.options(config)[0], op.weight_bits(config)
                if op.precision.mode == "scheduled" and stage is not None:
                    now = op.precision.at(config, stage)
                bits[op.name] = now.fw if fixed is None else fixed
        save_adapter(self._state.original, Path(directory), base, bits, config)


def pack(state: ModelState, quantizers: Collection[str] | None = None) -> PackedWeights:
    """Pack the frozen weights of a model, or those that certain quantizers round, as a checkpoint has them."""
    _require_packable(state)
    original = state.original
    names: defaultdict[int, list[str]] = defaultdict(list)
    for name, parameter in original.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    readers = readers_of(_graphs(state))
    chosen: dict[str, Codable] = {}
    left: dict[str, str] = {}
    for name, parameter in original.named_parameters():
        verdict = codable(names[id(parameter)], readers.get(id(parameter), []), state.config)
        if isinstance(verdict, str):
            if not parameter.requires_grad:
                left[name] = verdict
        elif verdict.quantizer in quantizers if quantizers is not None else not parameter.requires_grad:
            chosen[name] = verdict
    if not chosen:
        reasons = "; ".join(f"{count} {why}" for why, count in Counter(left.values()).most_common(3))
        raise ModelError(
            f"no weight can be kept as codes. Frozen parameters: {reasons or 'none'}. Freeze weights before "
            "(requires_grad_(False), or PEFT's get_peft_model), and pin float ops to a width, for example "
            "pins=(Pin('last', 'FW-8/BW-8'),)"
        )
    for name in chosen:  # all of them before the first one is replaced
        parameter = original.get_parameter(name)
        if not (parameter.is_meta or bool(torch.isfinite(parameter).all())):
            raise ModelError(f"{name} has NaN or infinite values, which no code stands for: load a sound checkpoint")
    float32 = sum(4 * original.get_parameter(name).numel() for name in (*chosen, *left))
    left_bytes = sum(original.get_parameter(name).nbytes for name in left)
    packed = [_pack(state, name, weight, readers) for name, weight in chosen.items()]
    _changed(state)
    state.variants.closed = _CLOSED
    packed_bytes = sum(x.nbytes for weight in packed for x in (weight.codes, weight.lo, weight.span, weight.bits))
    return PackedWeights({weight.name: weight.width for weight in packed}, left, packed_bytes, left_bytes, float32)


def unpack(state: ModelState) -> frozenset[str]:
    """Put the rounded values back as float parameters, which the graphs then read; returns the parameters' names."""
    names = []
    for path, quantizer, frozen in list(_packed(state)):
        names.append(frozen.name)
        owner, name = _owner(state.original, frozen.name)
        owner.__dict__.pop(name)
        owner._parameters[name] = nn.Parameter(frozen.values(), requires_grad=False)
        for graph_module in _graphs(state):
            for node in graph_module.graph.find_nodes(op="get_attr", target=f"{path}{CODES}"):
                node.target = frozen.name
        quantizer.frozen = None
    if names:
        _changed(state)
        state.variants.closed = None
    return frozenset(names)


def require_form(state: ModelState, given: Mapping[str, object]) -> None:
    """Check that a checkpoint has codes exactly for the weights that the model has as codes."""
    ours = {path: frozen.name for path, _, frozen in _packed(state)}
    floats = [name for name in ours.values() if name in given]
    if floats:
        raise ModelError(
            f"the checkpoint has float values of {floats[0]}, which this model keeps as codes "
            f"({len(floats)} such weights): load it before pack_frozen()"
        )
    codes = [key for key in given if key.endswith(CODES) and key.removesuffix(CODES) not in ours]
    if codes:
        raise ModelError(
            f"the checkpoint keeps {len(codes)} frozen weights as codes, which this model has as floats: call "
            "model.pack_frozen() before load_state_dict, or load with FracModel.from_pretrained"
        )


def require_stage(state: ModelState, precision: Precision) -> None:
    """Check that a stage leaves packed weights the bits that their codes have."""
    for path, _, frozen in _packed(state):
        for node in state.recording.train.graph.find_nodes(op="call_module", target=path):
            bits = node.args[1]
            staged = isinstance(bits, Node) and str(bits.target) == "frac.stage.fw"
            if staged and frozen.width != precision.fw:
                raise ConfigError(
                    f"{precision} asks for {precision.fw} bits of {frozen.name}, which is kept as codes of "
                    f"{frozen.width}: set a stage of FW-{frozen.width}, or call model.restore() first, which puts "
                    "float values back"
                )


def _require_packable(state: ModelState) -> None:
    config = state.config
    if state.sharding is not None:
        raise ModelError("the model is sharded: call pack_frozen() before fully_shard, which then shards the codes")
    if any(True for _ in _packed(state)):
        raise ModelError("frozen weights are codes already: call model.restore() first, which puts float values back")
    if config.method in ("float", "slu") or config.format != "affine" or config.affine.per_product:
        raise ConfigError(
            f"pack_frozen() keeps the codes of format 'affine' with affine.ranges='tensor' or 'sample', and method "
            f"{config.method!r} with format {config.format!r} and affine.ranges={config.affine.ranges!r} has no such "
            "weights: write method='fractrain', format='affine' and weight_bits=4"
        )
    if config.scheduled:
        stages, widths = config.precision_stages, {stage.fw for stage in config.precision_stages}
        now = next(int(module.fw) for module in state.recording.train.modules() if isinstance(module, StageBits))
        if len(widths) > 1 or now not in widths:
            text = f"stages {', '.join(map(str, stages))}" if len(widths) > 1 else f"FW-{now} now and {stages[0]} later"
            raise ConfigError(
                f"{text} ask for several widths of weights, and codes have one: write stages of one forward width "
                "(FW(4,4)/BW(6,8)), or method='fractrain' or 'dfq' with weight_bits=4, where only activations and "
                "gradients change"
            )


def _graphs(state: ModelState) -> Iterator[RecordedModule]:
    """The graphs that are shown, of every recording."""
    for variant in state.variants:
        yield from variant.recording.graphs


def _packed(state: ModelState) -> Iterator[tuple[str, WeightQuantizer, FrozenWeight]]:
    """The quantizers whose weights are codes: the path, the quantizer and the weight."""
    for path, module in state.recording.train.named_modules():
        if isinstance(module, WeightQuantizer) and module.frozen is not None:
            yield path, module, module.frozen


def _pack(state: ModelState, name: str, weight: Codable, readers: Readers) -> FrozenWeight:
    """Put codes in the place of one weight, whose floats are freed."""
    owner, leaf = _owner(state.original, name)
    parameter = owner._parameters[leaf]
    quantizer = state.recording.train.get_submodule(weight.quantizer)
    assert isinstance(quantizer, WeightQuantizer) and parameter is not None
    quantizer.frozen = frozen = FrozenWeight(
        parameter, weight.bits, cast(AffineFormat, quantizer.fmt), quantizer.dim, name
    )
    for _, node in readers[id(parameter)]:
        node.target = f"{weight.quantizer}{CODES}"
    # The name stays in the dictionary, so that parameters keep their order; code of the original reads values.
    owner._parameters[leaf] = None
    owner.__dict__[leaf] = frozen
    return frozen


def _owner(original: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return original.get_submodule(path), leaf


def _changed(state: ModelState) -> None:
    """Make the copies that run again, and take the present parameters for those of the graphs."""
    for graph_module in _graphs(state):
        graph_module.recompile()
    for variant in state.variants:
        for running in variant.running.values():
            running.current()
    state.as_recorded.structure.adopt_tensors()
    state.as_recorded.check_closely()
