"""How tests take products of codes: on units for bytes, and by C++ kernels where the processor has AVX2."""

from __future__ import annotations

import pytest

from fractrain_fx.native import kernels

__all__ = ["FORMS", "needs_kernels"]

# Whether C++ kernels multiply.
FORMS = [False, True] if kernels().has_products() else [False]

needs_kernels = pytest.mark.skipif(True not in FORMS, reason="needs AVX2")
