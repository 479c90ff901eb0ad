"""The recipes of number formats by name: what they cost, where they come from, and what the source does otherwise."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fractrain_fx.config import RECIPE_BITS, RECIPES, SCALE_BITS, FracConfig, Precision, Recipe

__all__ = ["FORMAT_RECIPES", "FormatRecipe"]


@dataclass(frozen=True)
class FormatRecipe:
    """A recipe that others train with, as this package computes it.

    Attributes:
        name: as ``FracConfig(recipe=...)`` takes it.
        source: where it was published.
        scales: bits of its scales, which costs leave out.
        differs: what the source does otherwise.
    """

    name: str
    source: str
    scales: str
    differs: str

    @property
    def recipe(self) -> Recipe:
        """How it rounds the operands of each product."""
        return RECIPES[self.name]

    @property
    def precision(self) -> Precision:
        """Its bits throughout a training."""
        return RECIPE_BITS[self.name]

    @property
    def cp(self) -> float:
        """Cost of the three products in per cent of 32 x 32 bit products, counting the bits of elements."""
        recipe = self.recipe
        return 100 * sum(self.precision.shares(self.precision.fw, recipe.least, by_product=recipe.by_product)) / 3

    @property
    def config(self) -> FracConfig:
        """A configuration that trains with it throughout."""
        return FracConfig(method="static", format=self.recipe.format, recipe=self.name, precision=self.precision)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with every field of the recipe."""
        values = {"name": self.name, "precision": str(self.precision), "cp": self.cp, "scales": self.scales}
        return values | {"source": self.source, "differs": self.differs, "recipe": asdict(self.recipe)}


FORMAT_RECIPES = {
    recipe.name: recipe
    for recipe in (
        FormatRecipe(
            "fp8",
            "arXiv 2209.05433",
            "32 bits for a tensor",
            "scales of past steps (delayed scaling) in place of the tensor's own; attention's products in 16 bits",
        ),
        FormatRecipe(
            "mxfp8",
            "OCP Microscaling 1.0; arXiv 2506.08027",
            SCALE_BITS["mx"],
            "scales are rounded up, so that nothing saturates; attention's products in 16 bits",
        ),
        FormatRecipe(
            "mxfp4",
            "OCP Microscaling 1.0; arXiv 2502.20586",
            SCALE_BITS["mx"],
            "forward products in 8 or 16 bits; the Hadamard transform is 64 wide and in both gradients; gradients are "
            "scaled by 3/4 before they are rounded, so that no value saturates and the expected value stays",
        ),
        FormatRecipe(
            "nvfp4",
            "arXiv 2509.25149",
            SCALE_BITS["nvfp4"],
            "about a seventh of the linear layers and attention's products in 16 bits",
        ),
        FormatRecipe(
            "mxfp8-nvfp4",
            "this package: mxfp8 forward, NVFP4 gradients",
            f"{SCALE_BITS['mx']} forward, {SCALE_BITS['nvfp4']} in gradients",
            "nothing: it is an example of a format for each product",
        ),
        FormatRecipe(
            "four-over-six",
            "arXiv 2512.02010",
            SCALE_BITS["nvfp4"],
            "some of the linear layers and attention's products in 16 bits",
        ),
        FormatRecipe(
            "tetrajet-v2",
            "arXiv 2510.27527, and the authors' code (thu-ml/TetraJet-v2-NVFP4Training)",
            f"{SCALE_BITS['nvfp4']}, and 32 bits for 128 values",
            "OsciReset moves weights that oscillate to the middle of their level; OutControl keeps channels with "
            "outliers in MXFP8; block scales may be subnormal; attention's products in 16 bits",
        ),
        FormatRecipe(
            "quartet-ii",
            "arXiv 2601.22813, and the authors' code (IST-DASLab/Quartet-II)",
            SCALE_BITS["nvfp4"],
            "its GPU kernels correct the scale of each 16 values for themselves, its reference code those of 128, as "
            "here; attention's products in 16 bits",
        ),
        FormatRecipe(
            "deepseek",
            "arXiv 2412.19437, section 3.3",
            "32 bits for 128 values of x and g, and for 128 x 128 of w",
            "some scales are powers of two; float32 sums every 128 terms; attention's products, head and routers in "
            "16 bits",
        ),
        FormatRecipe(
            "jetfire",
            "arXiv 2403.12422",
            "32 bits for 32 x 32 values",
            "results of products, GELU and LayerNorm are 8-bit blocks too (an int8 data flow); attention's products in "
            "16 bits",
        ),
        FormatRecipe(
            "halo",
            "arXiv 2501.02625 (HALO-2 in INT8), and the authors' code (IST-DASLab/HALO)",
            "32 bits for the tensor",
            "its transforms span all features and all rows, not 128 of them; it fine-tunes; attention's products in 16 "
            "bits",
        ),
        FormatRecipe(
            "int8",
            "torchao, Int8MixedPrecisionTrainingConfig",
            "32 bits for a row of both operands",
            "attention's products in 16 bits",
        ),
        FormatRecipe(
            "switchback",
            "arXiv 2304.13013",
            "32 bits for a row of x and g, and for the tensor w",
            "attention's products in 16 bits; the weight gradient in the 16-bit type of the model",
        ),
    )
}
"""Every named recipe."""
