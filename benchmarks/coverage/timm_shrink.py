"""Smaller architectures of timm: arguments from an entry function to its class are cut in depth and width."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["Cut", "cutting"]

# Fields of keyword arguments and of timm's configuration classes that hold numbers of blocks.
_DEPTHS = frozenset(
    {"depth", "depths", "layers", "num_blocks", "num_layers", "block_depths", "levels", "stage_blocks", "repeats"}
    | {"block_repeats", "num_repeats", "block_config", "num_blocks_list", "d"}
)
_HEADS = frozenset({"num_heads", "heads", "num_kv_heads"})
_WIDTHS = frozenset(
    {"embed_dim", "embed_dims", "dims", "dim", "hidden_dim", "hidden_dims", "out_chs", "channels", "stem_width"}
    | {"stem_chs", "planes", "widths", "head_hidden_size", "num_features", "mlp_hidden_dim", "c"}
)
_BLOCKS, _REGNET_BLOCKS, _WIDEST, _NARROW = 2, 8, 128, 32


@dataclasses.dataclass(frozen=True)
class Cut:
    """The sizes to make smaller.

    Attributes:
        depth: whether to keep at most two blocks in the last stage, and one in others.
        width: whether to divide dimensions and heads by one number.
    """

    depth: bool
    width: bool

    @property
    def names(self) -> list[str]:
        return [field.name for field in dataclasses.fields(self) if getattr(self, field.name)]


@contextlib.contextmanager
def cutting(cut: Cut) -> Iterator[None]:
    """Make timm build smaller models inside: the one builder of all entry functions gets smaller numbers."""
    from timm.models import _builder

    real = _builder.build_model_with_cfg

    def build(model_cls: Any, variant: str, pretrained: bool, **options: Any) -> Any:
        own = {name: options.pop(name) for name in _passed_on(real, options)}
        config = options.pop("model_cfg", None)
        options = {**_sizes_by_default(model_cls), **options}
        factor = _factor(options, config) if cut.width else 1
        if cut.depth:
            options, config = _shallower(options), _shallower(config)
        if factor > 1:
            options, config = _narrower(options, factor), _narrower(config, factor)
        return real(model_cls, variant, pretrained, model_cfg=config, **own, **options)

    users = [m for name, m in sys.modules.items() if name.startswith("timm.models.") and _uses(m, real)]
    for module in users:
        module.build_model_with_cfg = build  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in users:
            module.build_model_with_cfg = real  # type: ignore[attr-defined]


def _uses(module: Any, builder: Any) -> bool:
    return getattr(module, "build_model_with_cfg", None) is builder


def _passed_on(builder: Any, options: Mapping[str, Any]) -> list[str]:
    """The names of the builder's own arguments, except the configuration of the architecture."""
    known = inspect.signature(builder).parameters
    return [name for name in options if name in known and name != "model_cfg"]


def _sizes_by_default(kind: Any) -> dict[str, Any]:
    """The default sizes of a class, for entry functions that do not give them."""
    known = inspect.signature(kind).parameters
    return {
        name: parameter.default
        for name, parameter in known.items()
        if name in _DEPTHS | _HEADS | _WIDTHS and (_is_int(parameter.default) or isinstance(parameter.default, tuple))
    }


def _shallower(value: Any, field: str = "") -> Any:
    if field == "block_args":
        return _fewer_entries(value)
    if field in _DEPTHS:
        return _fewer(value)
    if type(value).__name__ == "RegNetCfg":
        return dataclasses.replace(value, depth=min(value.depth, _REGNET_BLOCKS))
    return _mapped(value, _shallower)


def _narrower(value: Any, factor: int, field: str = "") -> Any:
    if field in _HEADS or field in _WIDTHS:
        least = _NARROW if field in _WIDTHS else 1
        return _each(value, lambda size: size // factor if size % factor == 0 and size // factor >= least else size)
    if field == "width_factor" and _is_number(value):
        return min(value, 1)
    return _mapped(value, lambda part, name: _narrower(part, factor, name))


def _mapped(value: Any, change: Any) -> Any:
    """The same containers with their fields changed."""
    if isinstance(value, dict):
        return {name: change(part, str(name)) for name, part in value.items()}
    if isinstance(value, tuple | list) and any(_is_container(part) for part in value):
        return type(value)(change(part, "") for part in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        new = {name: change(part, name) for name, part in fields.items()}
        return dataclasses.replace(value, **{name: part for name, part in new.items() if part is not fields[name]})
    return value


def _is_container(value: Any) -> bool:
    return isinstance(value, dict | tuple | list) or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def _fewer(value: Any) -> Any:
    if _is_int(value):
        return min(value, _BLOCKS)
    if isinstance(value, tuple | list) and value and all(map(_is_int, value)):
        return type(value)(min(count, _BLOCKS if i + 1 == len(value) else 1) for i, count in enumerate(value))
    if isinstance(value, tuple | list):
        return type(value)(_each(part, lambda count: min(count, 1)) for part in value)
    return value


def _fewer_entries(stages: Any) -> Any:
    """Two blocks in the last stage with at least two, and its last block if that has another type; one in others.

    MobileNetV5 reads its features from the last block of a stage, which is never an attention block.
    """
    if not isinstance(stages, list) or not all(isinstance(stage, list) for stage in stages):
        return stages
    several = [i for i, stage in enumerate(stages) if len(stage) >= _BLOCKS]
    return [[*stage[:_BLOCKS], *_end(stage)] if [i] == several[-1:] else stage[:1] for i, stage in enumerate(stages)]


def _end(stage: list[Any]) -> list[Any]:
    second, last = stage[_BLOCKS - 1], stage[-1]
    both = isinstance(second, dict) and isinstance(last, dict)
    return [last] if both and second["block_type"] != last["block_type"] else []


def _factor(options: Any, config: Any) -> int:
    """A number that divides all heads and leaves at least two, and brings the widest stage to about 128."""
    heads = [n for n in _numbers((options, config), _HEADS) if n > 1]
    widths = [n for n in _numbers((options, config), _WIDTHS) if n > 1]
    if not widths:
        return 1
    # With several stages, a single width is that of the first stage, and each stage doubles it.
    stages = 1 if len(widths) > 1 else max(map(len, _lists((options, config), _DEPTHS)), default=1)
    wanted = max(1, max(widths) * 2 ** (stages - 1) // _WIDEST)
    if not heads:
        return 1 << int(math.log2(min(wanted, 8)))
    common = math.gcd(*heads)
    return max(d for d in range(1, common + 1) if common % d == 0 and (max(heads) // d >= 2 or d == 1) and d <= wanted)


def _lists(options: Any, names: frozenset[str]) -> list[Any]:
    fields = [options[0], *([vars(options[1])] if dataclasses.is_dataclass(options[1]) else [])]
    return [
        part for field in fields for name, part in field.items() if name in names and isinstance(part, tuple | list)
    ]


def _numbers(value: Any, names: frozenset[str], field: str = "") -> list[int]:
    if field in names:
        flat = value if isinstance(value, tuple | list) else [value]
        return [n for n in flat if _is_int(n)]
    if isinstance(value, dict):
        return [n for name, part in value.items() for n in _numbers(part, names, str(name))]
    if isinstance(value, tuple | list):
        return [n for part in value for n in _numbers(part, names)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [n for f in dataclasses.fields(value) for n in _numbers(getattr(value, f.name), names, f.name)]
    return []


def _each(value: Any, change: Any) -> Any:
    if _is_int(value):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(_each(part, change) for part in value)
    return value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
