"""The configuration that a user sets: frozen, validated dataclasses, and their form in YAML."""

from fractrain_fx.config.choices import (
    CODE_BITS,
    DISPATCH_FROM,
    TORCHAO_PRECISION,
    Attention,
    Control,
    Execution,
    GateGradient,
    GateInit,
    GradientGrid,
    Indicator,
    Kernels,
    MemoryFormat,
    Method,
    Rounding,
    Schedule,
    Skipping,
    Torchao,
)
from fractrain_fx.config.clock import Steps, Tokens
from fractrain_fx.config.config import FracConfig
from fractrain_fx.config.parts import GateConfig
from fractrain_fx.config.pins import Pin
from fractrain_fx.config.precision import (
    AUTHORS_IMAGENET_OPTIONS,
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
from fractrain_fx.config.recipes import RECIPES, SCALE_BITS, usual_recipe
from fractrain_fx.config.tuned import tuned_config, tuned_values

__all__ = [
    "AUTHORS_IMAGENET_OPTIONS",
    "AUTHORS_OPTIONS",
    "BLOCK_FORMATS",
    "CODE_BITS",
    "COMPACT_OPTIONS",
    "DFQ_OPTIONS",
    "DISPATCH_FROM",
    "FINE_OPTIONS",
    "FULL",
    "RECIPES",
    "SCALE_BITS",
    "SKIP",
    "TORCHAO_PRECISION",
    "Attention",
    "Control",
    "CostTargets",
    "Execution",
    "FracConfig",
    "GateConfig",
    "GateGradient",
    "GateInit",
    "GradientGrid",
    "Indicator",
    "Kernels",
    "MemoryFormat",
    "Method",
    "OperandRecipe",
    "Pin",
    "Precision",
    "PrecisionStages",
    "ProductRecipe",
    "Recipe",
    "Rounding",
    "Schedule",
    "Skipping",
    "Steps",
    "Tokens",
    "Torchao",
    "tuned_config",
    "tuned_values",
    "usual_recipe",
]
