"""The words that a configuration chooses from, and the numbers that go with them."""

from __future__ import annotations

from typing import Any, Literal

from fractrain_fx.config.precision import Precision

__all__ = [
    "CHOICES",
    "CODE_BITS",
    "DISPATCH_FROM",
    "TORCHAO_FORMATS",
    "TORCHAO_PRECISION",
    "Attention",
    "Control",
    "Execution",
    "GateInit",
    "GradientGrid",
    "Indicator",
    "Kernels",
    "MemoryFormat",
    "Method",
    "Ranges",
    "Rounding",
    "Schedule",
    "Skipping",
    "Torchao",
]

Method = Literal["float", "static", "pfq", "dfq", "fractrain", "slu"]
Schedule = Literal["auto", "two-stage", "manual", "cyclic", "fixed", "constant"]
Attention = Literal["quantized", "float"]
Torchao = Literal["torchao-int8", "torchao-float8", "torchao-mxfp8"]
Execution = Literal["simulate", "auto", Torchao]
Skipping = Literal["dispatched", "masked"]
Kernels = Literal["auto", "float", "int8"]
MemoryFormat = Literal["auto", "preserve"]
Rounding = Literal["auto", "eager", "triton", "compiled"]
Indicator = Literal["task", "total"]
GradientGrid = Literal["range", "zero"]
Ranges = Literal["tensor", "head", "row"]
Control = Literal["sign", "multiplier"]
GateInit = Literal["linear", "he"]
GateGradient = Literal["straight-through", "fisher"]

# The most bits of a code that products of codes multiply, which is one byte.
CODE_BITS = 8

# Share of skipped samples from which the gathered form of a block was measured to be faster (docs/execution.md).
DISPATCH_FROM = 0.1

# The precision at which torchao computes, at every stage.
TORCHAO_PRECISION = Precision(8, 8)

# The formats whose linear layers each kind of torchao training may compute, with the recipe that it follows. Under
# ``affine`` the layer is in torchao's numbers instead of the format's.
TORCHAO_FORMATS: dict[str, dict[str, str | None]] = {
    "torchao-int8": {"affine": None},
    "torchao-float8": {"affine": None, "fp8": "fp8"},
    "torchao-mxfp8": {"mx": "mxfp8"},
}

CHOICES: dict[str, Any] = {
    "method": Method,
    "schedule": Schedule,
    "attention": Attention,
    "execution": Execution,
    "skipping": Skipping,
    "kernels": Kernels,
    "memory_format": MemoryFormat,
    "rounding": Rounding,
    "indicator": Indicator,
    "gradient_grid": GradientGrid,
    "ranges": Ranges,
}
"""The fields of ``FracConfig`` that take one of a few words."""
