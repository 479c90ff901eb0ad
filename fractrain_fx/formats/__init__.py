"""Number formats: pure functions that round tensors, each format behind :class:`Format`."""

from __future__ import annotations

from fractrain_fx.config import BLOCK_FORMATS, Recipe, usual_recipe
from fractrain_fx.config.affine import AffineConfig
from fractrain_fx.config.recipes import RECIPES
from fractrain_fx.errors import ConfigError, near
from fractrain_fx.formats.affine import AffineFormat, RangedAffineFormat
from fractrain_fx.formats.base import Format, Operand, Reach, ValueRange
from fractrain_fx.formats.dorefa import DoReFaFormat
from fractrain_fx.formats.microscaling import MicroscalingFormat
from fractrain_fx.formats.wageubn import WageubnFormat

__all__ = [
    "AffineFormat",
    "DoReFaFormat",
    "Format",
    "MicroscalingFormat",
    "Operand",
    "RangedAffineFormat",
    "Reach",
    "ValueRange",
    "WageubnFormat",
    "get_format",
]


def get_format(name: str, *, affine: AffineConfig = AffineConfig(), recipe: Recipe | None = None) -> Format:
    """The format that ``FracConfig.format`` names.

    Args:
        name: the format's name.
        affine: the settings of format ``affine``; other formats do not read them.
        recipe: how a block format (``mx``, ``nvfp4``, ``fp8``, ``int``) rounds the operands of each product; by default
            its usual one (``mxfp8`` for ``mx``).

    Raises:
        ConfigError: no format has this name; the message lists those that exist.
    """
    levels: Format = RangedAffineFormat(affine) if affine.per_product else AffineFormat(affine)
    formats: dict[str, Format] = {fmt.name: fmt for fmt in (levels, DoReFaFormat(), WageubnFormat())}
    if name in BLOCK_FORMATS:
        return MicroscalingFormat(recipe or usual_recipe(name))
    if name not in formats:
        known = (*formats, *BLOCK_FORMATS)
        if name in RECIPES:
            block = RECIPES[name].format
            raise ConfigError(
                f"format={name!r} is a recipe of format {block!r}: write format={block!r} with recipe={name!r} "
                f"(--format {block} --set format_recipe={name})"
            )
        raise ConfigError(f"format={name!r} is unknown: write one of {', '.join(known)}.{near(name, known)}")
    return formats[name]
