"""How tests take products of codes: by C++ kernels, where the processor has AVX2."""

from __future__ import annotations

import pytest

from fractrain_fx.native import kernels

__all__ = ["needs_kernels"]

needs_kernels = pytest.mark.skipif(not kernels().has_products(), reason="needs AVX2")
