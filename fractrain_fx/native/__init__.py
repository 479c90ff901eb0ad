"""C++ kernels for a CPU: rounding, ranges, the gradient of gates, and products of integer codes."""

from fractrain_fx.native.build import kernels, known_to_compiler

__all__ = ["kernels", "known_to_compiler"]
