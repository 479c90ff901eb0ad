"""Both gradients of a gate's choice against naive sums over options, in float64, for random shapes and options."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given, settings
from torch.nn import functional as F

from fractrain_fx.config import GateGradient
from fractrain_fx.formats import get_format
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.nn.quantizers import MixedActivationQuantizer

# A multiple of 3, 7, 15, 63 and 255, and odd: integers from 0 to it fall on no tie at these bits, and float32 holds
# every step of the formula exactly.
SPAN = 5355
BITS = (2, 3, 4, 6, 8)


@settings(max_examples=60, deadline=None)
@given(
    samples=st.integers(1, 40),
    positions=st.integers(1, 50),
    options=st.lists(st.sampled_from((0, *BITS, 32)), min_size=2, max_size=8),
    fisher=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_equals_the_naive_sum_over_options(
    samples: int, positions: int, options: list[int], fisher: bool, seed: int
) -> None:
    chance = np.random.default_rng(seed)
    x = chance.integers(0, SPAN + 1, (samples, positions)).astype(np.float64)
    x.flat[0], x.flat[-1] = 0, SPAN
    upstream = chance.standard_normal(x.shape)
    picks = torch.tensor(chance.integers(0, len(options), samples))

    estimate: GateGradient = "fisher" if fisher else "straight-through"
    quantizer = MixedActivationQuantizer(get_format("affine"), options, BatchAxis(), estimate=estimate)
    quantizer.eval()
    quantizer.range.lo.fill_(0.0)
    quantizer.range.span.fill_(float(SPAN))
    choice = F.one_hot(picks, len(options)).float().requires_grad_()
    values = torch.tensor(x, dtype=torch.float32, requires_grad=True)
    rounded = quantizer(values, choice)
    rounded.backward(torch.tensor(upstream, dtype=torch.float32))

    def by_formula(bits: int) -> np.ndarray:
        if bits not in BITS:
            return x
        step = SPAN / (2**bits - 1)
        return np.rint(x / step) * step

    forward = np.stack([by_formula(options[pick])[i] for i, pick in enumerate(picks)])
    assert np.array_equal(rounded.detach().double().numpy(), forward)
    parts = np.stack([(by_formula(bits) - x) * upstream for bits in options], axis=1)
    if fisher:
        parts = samples / 2 * parts**2
    naive, sizes = parts.sum(2), np.abs(parts).sum(2)
    if any(bits in BITS for bits in options):
        assert choice.grad is not None
        # 1e-5 of what the sum adds up, which may cancel.
        assert (np.abs(choice.grad.double().numpy() - naive) <= 1e-5 * sizes).all()
    assert values.grad is not None and torch.equal(values.grad, torch.tensor(upstream, dtype=torch.float32))
