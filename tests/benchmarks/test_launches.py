"""Launches of a step, counted without a GPU: upper bounds, so that a step that launches more is noticed."""

from __future__ import annotations

import pytest

from benchmarks.launches import launches, launches_compiled
from benchmarks.step.subjects import Subject, next_token_loss, tokens
from fractrain_fx.kernels.triton import fit
from fractrain_fx.zoo.models.transformer import TransformerLM
from tests.models import thinned

pytest.importorskip("triton")

SMALL = Subject(
    "a transformer of one layer",
    lambda: TransformerLM(1000, width=32, hidden=64, layers=1, heads=2, dropout=0.0),
    {"cpu": 4},
    tokens(16),
    next_token_loss,
)


# Counted exactly, and 87 for float: PFQ is below its goal of 2.0 times float, DFQ below 3.5.
@pytest.mark.parametrize(
    ("method", "most"),
    thinned([("dfq", 262), ("pfq", 153), ("mxfp8", 156), ("nvfp4", 528), ("fp8", 256), ("mxfp4", 428)], 3),
)
def test_a_step_launches_no_more_than_it_did(method: str, most: int) -> None:
    assert launches(SMALL, method).total() <= most


def test_each_rounding_is_one_launch_by_kernels_and_many_without() -> None:
    has_triton = fit.has_triton
    by_kernels, plain = (launches(SMALL, "pfq", kernels=kernels) for kernels in (True, False))
    assert fit.has_triton is has_triton  # as it was
    # Six layers and two products of attention: eight gradients; eight activations in forward, of which three layers
    # read one; seven in backward, where the first one is the last of forward; and both of attention's scores once more.
    assert by_kernels["triton rounded"] == 25 and by_kernels["triton rounded_rows"] == 6
    assert not any(name.startswith("triton") for name in plain)
    assert plain.total() - by_kernels.total() > 20 * (25 + 6)


# Counted: 80 under PFQ, and 44 for float.
@pytest.mark.slow
def test_a_compiled_step_launches_fewer_kernels_than_an_eager_step_in_float() -> None:
    found = {method: launches_compiled(SMALL, method) for method in ("float", "pfq")}
    assert 7 < found["float"]["extern_kernels.addmm"] + found["float"]["extern_kernels.mm"] < 30
    assert found["float"].total() < found["pfq"].total() <= 82 < launches(SMALL, "float").total()
