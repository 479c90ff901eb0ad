"""Cycles and energy of a convolution on BitFusion (Sharma et al., ISCA 2018), and of the three passes of training it.

The analytical model of the public simulator (hsharma35/bitfusion, configuration bf_e_conf) at 45 nm: every tiling and
loop order is priced. The one with the fewest cycles is taken, and among equals the one with the least energy. The array
multiplies 2 to 8 bits. A wider operand is cut into ``ceil(bits / 8)`` equally wide digits, and the layer runs once for
each pair of digits; ``ConvolutionRun.passes`` is the number of these runs.

Sizes have the simulator's names: kernel side K, output side O, input side I, stride S, input and output channels IC and
OC, batch B. ``a`` is the activation-like operand and ``w`` the weight-like one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from fractrain_fx.errors import ConfigError
from fractrain_fx.hardware.bitfusion_tiling import (
    OUTPUT_BITS,
    OUTPUT_UNITS,
    NativeConvolution,
    Tilings,
    ceil_div,
    dram_traffic,
    tilings,
)

__all__ = ["ConvolutionRun", "TrainingRun", "convolution", "training_step"]

FREQUENCY = 500e6  # Hz
NATIVE_BITS = 8
DRAM_PORT = 192  # bits a cycle

# Energies in pJ: CORE for a cycle of the whole array, the others for a bit
CORE = 235.104
READ = {"weights": 0.021365656, "activations": 0.059474375, "outputs": 0.033155313}
WRITE = {"weights": 0.028916156, "activations": 0.113704063, "outputs": 0.073084063}
DRAM = 15.0


@dataclass(frozen=True)
class ConvolutionRun:
    """The cost of one convolution: ``cycles``, ``energy_nj`` (dynamic), and the number of ``passes``.

    During ``waiting`` of the cycles the array waits for memory.
    """

    cycles: int
    energy_nj: float
    passes: int = 1
    waiting: int = field(default=0, compare=False)

    @property
    def seconds(self) -> float:
        """Latency at the array's 500 MHz."""
        return self.cycles / FREQUENCY


@dataclass(frozen=True)
class TrainingRun:
    """The three convolutions of a training step: forward, error back (``None`` in the first layer), weight gradient."""

    fw: ConvolutionRun
    eb: ConvolutionRun | None
    gc: ConvolutionRun

    @property
    def cycles(self) -> int:
        """Sum over the three."""
        return sum(run.cycles for run in self._runs)

    @property
    def energy_nj(self) -> float:
        """Sum over the three."""
        return sum(run.energy_nj for run in self._runs)

    @property
    def seconds(self) -> float:
        """Sum over the three: they run one after the other."""
        return self.cycles / FREQUENCY

    @property
    def _runs(self) -> tuple[ConvolutionRun, ...]:
        return (self.fw, self.gc) if self.eb is None else (self.fw, self.eb, self.gc)


def training_step(
    K: int,
    O: int,
    S: int,
    IC: int,
    OC: int,
    B: int,
    *,
    a_bits: int,
    w_bits: int,
    g_bits: int,
    I: int | None = None,
    first: bool = False,
) -> TrainingRun:
    """Price one training step of a layer.

    Args:
        K: kernel side.
        O: output side.
        S: stride.
        IC: input channels.
        OC: output channels.
        B: samples.
        a_bits: bits of the activations (the paper's forward bits).
        w_bits: bits of the weights.
        g_bits: bits of the output gradients (the paper's backward bits).
        I: input side; by default ``O * S``, as with same padding.
        first: whether nothing before the layer is trained, so that no error is propagated to its input.

    Raises:
        ConfigError: a size or a number of bits is below 1.
    """
    side = O * S if I is None else I
    return TrainingRun(
        fw=convolution(K, O, S, IC, OC, B, a_bits, w_bits),
        eb=None if first else convolution(K, side, 1, OC, IC, B, g_bits, w_bits),
        # The weight gradient as a matrix product: each of the K^2 * IC weights of a filter sums over all positions.
        gc=convolution(1, 1, 1, B * O**2, OC, K**2 * IC, a_bits, g_bits),
    )


def convolution(
    K: int, O: int, S: int, IC: int, OC: int, B: int, a_bits: int, w_bits: int, *, im2col: bool = False
) -> ConvolutionRun:
    """Price one convolution; a linear layer is a convolution with K = O = S = 1.

    Args:
        K: kernel side.
        O: output side.
        S: stride.
        IC: input channels.
        OC: output channels.
        B: samples.
        a_bits: bits of the activation-like operand.
        w_bits: bits of the weight-like operand.
        im2col: fill the array with kernel positions and channels together, instead of channels alone.

    Returns:
        Cycles (at 500 MHz) and dynamic energy (in nJ) of the fastest tiling and loop order.

    Raises:
        ConfigError: a size or a number of bits is below 1, or no tile of the kernel fits the SRAMs.
    """
    for name, value in (("K", K), ("O", O), ("S", S), ("IC", IC), ("OC", OC), ("B", B)):
        if value < 1:
            raise ConfigError(f"a convolution with {name}={value} does not exist: sizes are at least 1")
    for name, value in (("a_bits", a_bits), ("w_bits", w_bits)):
        if value < 1:
            raise ConfigError(f"{name}={value}: write at least 1 bit; a skipped layer is not run and costs nothing")
    a_digits, w_digits = -(-a_bits // NATIVE_BITS), -(-w_bits // NATIVE_BITS)
    passes = a_digits * w_digits
    layer = NativeConvolution(K, O, S, IC, OC, B, -(-a_bits // a_digits), -(-w_bits // w_digits), im2col)
    cycles, energy, waiting = _price(layer)
    return ConvolutionRun(cycles * passes, energy * passes / 1000, passes, waiting * passes)


@cache
def _price(layer: NativeConvolution) -> tuple[int, float, int]:
    """Cycles, energy (pJ) and cycles of waiting of one pass with the best tiling and loop order."""
    tiles = tilings(layer)
    if not tiles.count.size:
        raise ConfigError(f"{layer}: not even its smallest tile fits BitFusion's SRAMs; split the kernel")
    traffic = dram_traffic(tiles)
    # Partial sums are read back as often as they are written.
    dram = traffic.total["weights"] + traffic.total["activations"] + 2 * traffic.total["outputs"]
    last = traffic.fill["outputs"]
    first = traffic.fill["weights"] + traffic.fill["activations"] + last
    # The first fill and the last drain overlap no computation. Other traffic overlaps the computation.
    stall = np.maximum(0, ceil_div(dram - first - last, DRAM_PORT) - tiles.compute)
    cycles = tiles.compute + stall + ceil_div(first, DRAM_PORT) + ceil_div(last, DRAM_PORT)
    energy = (
        tiles.compute * CORE
        + tiles.count * _sram_energy(layer, tiles)
        + sum(traffic.total[tensor] * WRITE[tensor] for tensor in traffic.total)
        + traffic.total["outputs"] * READ["outputs"]
        + dram * DRAM
    )
    fewest = cycles.min()
    energy = np.where(cycles == fewest, energy, np.inf)
    waiting = np.broadcast_to(cycles - tiles.compute, energy.shape).flat[energy.argmin()]
    return int(fewest), float(energy.min()), int(waiting)


def _sram_energy(layer: NativeConvolution, tiles: Tilings) -> NDArray[np.float64]:
    """Energy (pJ) of the array's reads and writes during one tile, with the dataflow of the fewest accesses."""
    b, o, ic, oc = tiles.size.values()
    a, w, out, q = layer.a_bits, layer.w_bits, OUTPUT_BITS, layer.inputs_at_once
    reduced, positions = layer.K**2 * ic, b * o**2
    # sizes padded to the two sides of the array
    padded_in, padded_out = ceil_div(ic, q) * q * layer.K**2, ceil_div(oc, OUTPUT_UNITS) * OUTPUT_UNITS
    products = reduced * positions * oc
    # dataflow: (accesses that choose it, bits of activations, of weights, of outputs read and written)
    stationary = {
        "input": (
            padded_in * positions * (a + padded_out * (w + out)),
            reduced * positions * a,
            products * w,
            products * out,
        ),
        "output": (
            padded_out * positions * (out + padded_in * (a + w)),
            products * a,
            products * w,
            oc * positions * out,
        ),
        "weight": (
            padded_in * padded_out * (w + positions * (a + out)),
            products * a,
            reduced * oc * w,
            products * out,
        ),
    }
    proxies = np.stack([row[0] for row in stationary.values()])
    energies = np.stack(
        [
            activations * READ["activations"]
            + weights * READ["weights"]
            + outputs * (READ["outputs"] + WRITE["outputs"])
            for _, activations, weights, outputs in stationary.values()
        ]
    )
    chosen: NDArray[np.float64] = np.take_along_axis(energies, proxies.argmin(0)[None], 0)[0]
    return chosen
