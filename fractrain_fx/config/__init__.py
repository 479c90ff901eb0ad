"""The configuration that a user sets: frozen, validated dataclasses, and their form in YAML."""

from fractrain_fx.config.affine import AffineConfig
from fractrain_fx.config.clock import Steps, Tokens
from fractrain_fx.config.config import Attention, FracConfig, Method
from fractrain_fx.config.gate import Control, GateConfig, GateGradient, GateInit
from fractrain_fx.config.paper import paper_values
from fractrain_fx.config.pins import Pin
from fractrain_fx.config.precision import (
    AUTHORS_OPTIONS,
    COMPACT_OPTIONS,
    DFQ_OPTIONS,
    FINE_OPTIONS,
    FULL,
    SKIP,
    CostTargets,
    Precision,
    PrecisionStages,
)
from fractrain_fx.config.products import BLOCK_FORMATS, OperandRecipe, ProductRecipe, Recipe
from fractrain_fx.config.recipes import RECIPE_BITS, RECIPES, SCALE_BITS, usual_recipe
from fractrain_fx.config.run import CODE_BITS, Backend, MemoryFormat, RunConfig
from fractrain_fx.config.schedule import (
    ByLength,
    Constant,
    Cyclic,
    Fixed,
    LossPlateau,
    Manual,
    Schedule,
    TwoStage,
)

__all__ = [
    "AUTHORS_OPTIONS",
    "BLOCK_FORMATS",
    "CODE_BITS",
    "COMPACT_OPTIONS",
    "DFQ_OPTIONS",
    "FINE_OPTIONS",
    "FULL",
    "RECIPES",
    "RECIPE_BITS",
    "SCALE_BITS",
    "SKIP",
    "AffineConfig",
    "Attention",
    "Backend",
    "ByLength",
    "Constant",
    "Control",
    "CostTargets",
    "Cyclic",
    "Fixed",
    "FracConfig",
    "GateConfig",
    "GateGradient",
    "GateInit",
    "LossPlateau",
    "Manual",
    "MemoryFormat",
    "Method",
    "OperandRecipe",
    "Pin",
    "Precision",
    "PrecisionStages",
    "ProductRecipe",
    "Recipe",
    "RunConfig",
    "Schedule",
    "Steps",
    "Tokens",
    "TwoStage",
    "paper_values",
    "usual_recipe",
]
