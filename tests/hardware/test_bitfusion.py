"""BitFusion: check values of the simulator, agreement with a slow rendering of the rules, and training steps."""

from __future__ import annotations

import time
from itertools import permutations, product
from math import ceil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fractrain_fx.errors import ConfigError
from fractrain_fx.hardware.bitfusion import ConvolutionRun, convolution, training_step


@pytest.mark.parametrize(
    ("O", "C", "cycles", "energy_nj"), [(32, 16, 12_086, 38_689), (16, 32, 5_505, 15_599), (8, 64, 5_804, 19_419)]
)
def test_check_values_of_the_simulator(O: int, C: int, cycles: int, energy_nj: int) -> None:
    run = convolution(3, O, 1, C, C, 1, 8, 8)
    assert (run.cycles, round(run.energy_nj)) == (cycles, energy_nj)
    assert run.seconds == cycles / 500e6


def by_the_rules(K: int, O: int, S: int, IC: int, OC: int, B: int, a: int, w: int) -> tuple[int, float]:
    """One tile and one of all 120 orders at a time, rule by rule, in plain Python."""
    q = 16 * (8 // max(a, 2)) * (8 // max(w, 2))
    half = {"W": 262_144, "A": 131_072, "O": 65_536}
    loops = {"W": {"ic", "oc"}, "A": {"b", "ow", "oh", "ic"}, "O": {"b", "ow", "oh", "oc"}}

    def sides(first: int, whole: int) -> list[int]:
        return [first * 2**k for k in range(20) if first * 2**k < whole] + [whole]

    best = (10**18, 0.0)
    for b, o, ic, oc in product(sides(1, B), sides(1, O), sides(1, IC), sides(32, OC)):
        n = {"b": ceil(B / b), "ow": ceil(O / o), "oh": ceil(O / o), "ic": ceil(IC / ic), "oc": ceil(OC / oc)}
        nt, m = n["b"] * n["ow"] ** 2 * n["ic"] * n["oc"], ceil(oc / 32)
        tile = {
            "W": ceil(K**2 * ic / q) * q * oc * w,
            "A": (K + (o - 1) * S) ** 2 * ic * b * a,
            "O": o**2 * m * 32 * b * 32,
        }
        if any(tile[t] > half[t] for t in tile):
            continue
        comp = nt * b * m * o**2 * K**2 * ceil(ic / q)
        r, V, R, width = K**2 * ic, b * o**2, ceil(ic / q) * q * K**2, m * 32
        flows = [
            (R * V * (a + width * (w + 32)), r * V * a, r * V * oc * w, r * V * oc * 32),
            (width * V * (32 + R * (a + w)), oc * V * r * a, oc * V * r * w, oc * V * 32),
            (R * width * (w + V * (a + 32)), r * oc * V * a, r * oc * w, r * oc * V * 32),
        ]
        _, read_a, read_w, out = min(flows, key=lambda flow: flow[0])
        sram = read_a * 0.059474375 + read_w * 0.021365656 + out * (0.033155313 + 0.073084063)
        for order in permutations(n):
            s, fit = dict(tile), dict(tile)
            for t in tile:
                resident = True
                for loop in order:
                    if not resident:
                        s[t] *= n[loop]
                    elif loop in loops[t]:
                        s[t] *= n[loop]
                        resident = s[t] <= half[t]
                        if resident:
                            fit[t] = s[t]
            dram, first, last = s["W"] + s["A"] + 2 * s["O"], sum(fit.values()), fit["O"]
            cycles = comp + max(0, ceil((dram - first - last) / 192) - comp) + ceil(first / 192) + ceil(last / 192)
            fills = s["W"] * 0.028916156 + s["A"] * 0.113704063 + s["O"] * (0.073084063 + 0.033155313)
            best = min(best, (cycles, comp * 235.104 + nt * sram + fills + dram * 15))
    return best[0], best[1] / 1000


@settings(max_examples=40, deadline=None)
@given(
    K=st.sampled_from([1, 3, 5]),
    O=st.sampled_from([1, 7, 8, 16]),
    S=st.sampled_from([1, 2]),
    IC=st.sampled_from([1, 3, 16, 130]),
    OC=st.sampled_from([10, 32, 96]),
    B=st.sampled_from([1, 6]),
    a=st.integers(1, 8),
    w=st.integers(1, 8),
)
def test_agrees_with_the_rules_taken_one_by_one(
    K: int, O: int, S: int, IC: int, OC: int, B: int, a: int, w: int
) -> None:
    run = convolution(K, O, S, IC, OC, B, a, w)
    cycles, energy_nj = by_the_rules(K, O, S, IC, OC, B, a, w)
    assert run.cycles == cycles
    # 1e-12: the terms are the same, only their order of summation differs
    assert run.energy_nj == pytest.approx(energy_nj, rel=1e-12)


def test_three_bits_run_as_fast_as_four_and_five_as_eight() -> None:
    def compute_bound(bits: int) -> int:
        return convolution(3, 16, 1, 256, 256, 8, bits, bits).cycles

    # within the fills, which carry the true number of bits
    assert compute_bound(3) == pytest.approx(compute_bound(4), rel=0.02)
    assert compute_bound(5) == pytest.approx(compute_bound(8), rel=0.02)
    assert compute_bound(4) < 0.6 * compute_bound(8)


def test_above_eight_bits_a_layer_is_run_once_for_each_pair_of_digits() -> None:
    six, twelve = convolution(3, 8, 1, 64, 64, 2, 6, 4), convolution(3, 8, 1, 64, 64, 2, 12, 4)
    assert (six.passes, twelve.passes) == (1, 2)
    assert twelve == ConvolutionRun(2 * six.cycles, 2 * six.energy_nj, 2)
    assert convolution(3, 8, 1, 64, 64, 2, 32, 32).passes == 16


def test_im2col_helps_where_channels_are_few() -> None:
    assert convolution(5, 32, 1, 3, 64, 8, 8, 8, im2col=True).cycles < convolution(5, 32, 1, 3, 64, 8, 8, 8).cycles


def test_a_training_step_is_forward_error_and_weight_gradient() -> None:
    step = training_step(3, 16, 2, 16, 32, 4, a_bits=4, w_bits=6, g_bits=8)
    assert step.fw == convolution(3, 16, 2, 16, 32, 4, 4, 6)
    assert step.eb == convolution(3, 32, 1, 32, 16, 4, 8, 6)
    assert step.gc == convolution(1, 1, 1, 4 * 16**2, 32, 9 * 16, 4, 8)
    assert step.cycles == step.fw.cycles + step.eb.cycles + step.gc.cycles
    assert step.energy_nj == pytest.approx(step.fw.energy_nj + step.eb.energy_nj + step.gc.energy_nj)
    assert step.seconds == step.cycles / 500e6


def test_the_first_layer_propagates_no_error() -> None:
    step = training_step(3, 32, 1, 3, 16, 1, a_bits=8, w_bits=8, g_bits=8, first=True)
    assert step.eb is None
    assert step.cycles == step.fw.cycles + step.gc.cycles


@pytest.mark.parametrize("broken", [{"K": 0}, {"B": -1}, {"a_bits": 0}])
def test_what_does_not_exist_is_named(broken: dict[str, int]) -> None:
    sizes: dict[str, Any] = {"K": 3, "O": 8, "S": 1, "IC": 16, "OC": 16, "B": 1, "a_bits": 8, "w_bits": 8} | broken
    with pytest.raises(ConfigError, match=next(iter(broken))):
        convolution(**sizes)


def test_a_kernel_that_fits_no_sram_is_named() -> None:
    with pytest.raises(ConfigError, match="K=400"):
        convolution(400, 8, 1, 16, 16, 1, 8, 8)


def test_resnet74_at_all_options_takes_seconds() -> None:
    layers = [(3, 32, 1, 3, 16)] + 24 * [(3, 32, 1, 16, 16)]
    for side, inputs, width in ((16, 16, 32), (8, 32, 64)):
        layers += [(3, side, 2, inputs, width), (1, side, 2, inputs, width)] + 23 * [(3, side, 1, width, width)]
    layers.append((1, 1, 1, 64, 10))
    start = time.perf_counter()
    for a_bits, g_bits in ((2, 6), (3, 6), (4, 6), (4, 12), (6, 8), (6, 12), (8, 8)):
        for index, layer in enumerate(layers):
            training_step(*layer, 128, a_bits=a_bits, w_bits=4, g_bits=g_bits, first=index == 0)
    assert time.perf_counter() - start < 10
