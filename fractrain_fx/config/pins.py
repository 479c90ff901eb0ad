"""Rules that fix the precision of some contractions, and maybe their number format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fractrain_fx.config.kinds import require_sequence
from fractrain_fx.config.precision import FLOAT_BITS, Precision, PrecisionStages
from fractrain_fx.config.products import BLOCK_FORMATS, Recipe
from fractrain_fx.config.recipes import RECIPE_BITS, RECIPES, recipe_of, usual_recipe, widths_of
from fractrain_fx.errors import ConfigError, near

__all__ = ["Pin", "parse_pins"]

_OTHERS = ("affine", "dorefa", "wageubn")

# The bits that a name alone stands for.
_USUAL = RECIPE_BITS | {"bfloat16": Precision(16, 16), "float": Precision(FLOAT_BITS, FLOAT_BITS)}


@dataclass(frozen=True)
class Pin:
    """A rule: contractions that match ``pattern`` have ``precision`` for every input.

    It is one precision for all stages, or one for each stage of ``pfq``: ``Pin("layer1.*", "FW(4,6,8)/BW(6,6,8)")``.

    ``pattern`` is a shell-style pattern over op names (``blocks.0.*``), a kind of op (``linear``), ``depthwise`` or
    ``first``/``last``. Later rules win. ``Pin("depthwise", Precision(8, 16))`` is the paper's rule for MobileNetV2.

    Attributes:
        pattern: which contractions.
        precision: their bits, a :class:`Precision` or :class:`PrecisionStages`; not needed with a ``format`` or
            ``recipe`` that says them.
        format: their number format, if not that of the configuration: ``affine``, ``dorefa``, ``wageubn``, ``mx``,
            ``nvfp4``, ``fp8``, ``int``; or ``bfloat16`` or ``float``, without bits.
        recipe: how the operands of their products are rounded: ``mxfp8``, ``mxfp4``, ``nvfp4``, ``fp8``, ``jetfire``,
            ``int8``, ``switchback``, each with its usual bits if no others are given, or a :class:`Recipe`.

    Raises:
        ConfigError: there is no pattern, no bits, or bits that do not fit the format; or the format is unknown.
    """

    pattern: str
    precision: Precision | PrecisionStages = None  # type: ignore[assignment]  # never after the checks
    format: str | None = None
    recipe: str | Recipe | None = None

    if TYPE_CHECKING:  # text may be written where the field, which is read, has one type

        def __init__(
            self,
            pattern: str,
            precision: Precision | PrecisionStages | str | None = None,
            format: str | None = None,
            recipe: str | Recipe | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str) or not self.pattern:
            raise ConfigError("a Pin needs a pattern, for example Pin('layer4.*', Precision(8, 8))")
        if isinstance(self.recipe, Mapping):
            object.__setattr__(self, "recipe", recipe_of(self.recipe))
        self._check_format()
        name = self.recipe if isinstance(self.recipe, str) else self.format
        if self.precision is None:
            if name is None or name not in _USUAL:
                raise ConfigError(f"{self._shown()} does not say its bits: write 'FW-8/BW-8' after the pattern")
            object.__setattr__(self, "precision", _USUAL[name])
        object.__setattr__(self, "precision", _read(self.precision))
        if any(stage.skips for stage in self.stages):
            raise ConfigError(f"Pin({self.pattern!r}) at {self.precision} would remove the op: write 2 bits or more")
        if self.format in ("bfloat16", "float") and self.precision != _USUAL[self.format]:
            raise ConfigError(f"{self._shown()} has bits of its own: leave {self.precision} out")
        recipe = self.product_recipe
        if recipe is not None and (lacks := widths_of(recipe, *self.stages)) is not None:
            raise ConfigError(f"{self._shown()}: {lacks}")

    def _check_format(self) -> None:
        known = (*_OTHERS, *BLOCK_FORMATS, "bfloat16", "float")
        if self.format is not None and self.format not in known:
            offer = near(str(self.format), known)
            raise ConfigError(f"{self._shown()}: the format is unknown: write one of {', '.join(known)}.{offer}")
        if self.recipe is not None and self.format not in (None, recipe_of(self.recipe).format):
            raise ConfigError(f"{self._shown()}: the recipe is one of format {recipe_of(self.recipe).format!r}")

    @property
    def stages(self) -> tuple[Precision, ...]:
        """The precision of each stage; one for all of them if the rule does not tell stages apart."""
        return self.precision.stages if isinstance(self.precision, PrecisionStages) else (self.precision,)

    @property
    def number_format(self) -> str | None:
        """The number format that rounds the operands; ``None`` for that of the configuration."""
        if self.recipe is not None:
            return recipe_of(self.recipe).format
        return "mx" if self.format == "bfloat16" else None if self.format == "float" else self.format

    @property
    def product_recipe(self) -> Recipe | None:
        """The recipe of a block format; ``None`` if the pin names neither."""
        if self.recipe is not None:
            return recipe_of(self.recipe)
        if self.number_format not in BLOCK_FORMATS:
            return None
        return usual_recipe(
            self.number_format or "", narrow=min(stage.bw for stage in self.stages) < _USUAL["mxfp8"].bw
        )

    @property
    def named(self) -> str:
        """The format or recipe in words; empty if the pin names none."""
        if isinstance(self.recipe, Recipe):
            return f"a recipe of {self.recipe.format}"
        return self.recipe or self.format or ""

    @classmethod
    def parse(cls, text: str) -> Pin:
        """Read ``last=FW-8/BW-16``, ``last=FW(4,8)/BW(8,8)``, ``last=mxfp8`` or ``last=mx:FW-4/BW-8``."""
        pattern, equals, value = text.rpartition("=")
        if not equals:
            raise ConfigError(
                f"{text!r} is not a rule: write PATTERN=PRECISION, for example 'depthwise=FW-8/BW-16', or "
                "PATTERN=FORMAT, such as 'last=bfloat16' or 'last=mx:FW-4/BW-8'"
            )
        name, colon, bits = value.rpartition(":")
        if not colon and value in (*RECIPES, *_USUAL, *BLOCK_FORMATS, *_OTHERS):
            name, bits = value, ""
        named: dict[str, Any] = {"precision": _read(bits)} if bits else {}
        if name:
            named["recipe" if name in RECIPES else "format"] = name
        return cls(pattern, **named)

    def __str__(self) -> str:
        """As :meth:`parse` reads it; a recipe of one's own by its format."""
        name = self.named
        bits = "" if self.precision == _USUAL.get(name) else str(self.precision)
        return f"{self.pattern}={name}{':' if name and bits else ''}{bits}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values; format and recipe only if they are named."""
        plain: dict[str, Any] = {"pattern": self.pattern, "precision": str(self.precision)}
        if self.format is not None:
            plain["format"] = self.format
        if self.recipe is not None:
            plain["recipe"] = self.recipe if isinstance(self.recipe, str) else asdict(self.recipe)
        return plain

    def _shown(self) -> str:
        named = {"format": self.format, "recipe": self.recipe}
        text = ", ".join(f"{key}={value!r}" for key, value in named.items() if value is not None)
        return f"Pin({self.pattern!r}{', ' if text else ''}{text})"


def _read(precision: Any) -> Precision | PrecisionStages:
    if isinstance(precision, PrecisionStages) or (isinstance(precision, str) and "(" in precision):
        stages = PrecisionStages.parse(precision)
        return stages if len(stages.stages) > 1 else stages.stages[0]
    return Precision.parse(precision)


def parse_pins(pins: Any) -> tuple[Pin, ...]:
    """The rules of a configuration as a tuple.

    Raises:
        ConfigError: it is no sequence, or holds something else.
    """
    require_sequence("pins", pins, "(Pin('layer4.*', 'FW-8/BW-8'),)")
    for pin in pins:
        if not isinstance(pin, Pin):
            raise ConfigError(f"pins has {pin!r}, which is no Pin: write Pin('layer4.*', 'FW-8/BW-8')")
    return tuple(pins)
