"""This machine's processor as a roofline: what products, convolutions and a copy reach, measured as it is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

from fractrain_fx.hardware.roofline import TYPES, Roofline, Source

__all__ = ["cpu_of", "probes", "this_cpu"]

_ROWS, _WIDTH = 4096, 256  # of the products: rows of a batch, and channels in and out as models for a CPU have them
_SAMPLES, _CHANNELS, _SIDE = 16, 128, 16  # of the convolutions, with kernels of 3 x 3
_COPIED = 1 << 24  # float32 values: 64 MiB, more than the caches hold
_ROUNDS = 5
_CONVOLUTION = "convolution, "
_PASSES = 3  # oneDNN puts a convolution's operands into an order of its own, and the result back into torch's


def this_cpu() -> Roofline:
    """Measure this processor with torch's present number of threads; takes about a second."""
    runs = probes()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(1 + _ROUNDS):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return cpu_of({name: median(seconds[1:]) for name, seconds in times.items()})


def probes() -> dict[str, Callable[[], object]]:
    """The calls to time: a product of each type that the processor has units for, convolutions, and a ``copy``.

    Convolutions have a library of their own on a processor, which may reach half or twice of what products reach.
    """
    values, weights = torch.randn(_ROWS, _WIDTH), torch.randn(_WIDTH, _WIDTH)
    source, target = torch.ones(_COPIED), torch.empty(_COPIED)
    calls: dict[str, Callable[[], object]] = {
        "float32": _product(values, weights),
        "copy": lambda: target.copy_(source),
        f"{_CONVOLUTION}float32": _convolution(torch.float32),
    }
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        calls["bfloat16"] = _product(values.bfloat16(), weights.bfloat16())
        calls[f"{_CONVOLUTION}bfloat16"] = _convolution(torch.bfloat16)
    if torch.cpu._is_vnni_supported():
        rows, columns = (torch.randint(-128, 128, tuple(like.shape), dtype=torch.int8) for like in (values, weights))
        calls["int8"] = lambda: torch._int_mm(rows, columns)
    return calls


def cpu_of(seconds: Mapping[str, float]) -> Roofline:
    """The roofline of a processor on which the ``probes`` took so many seconds."""
    convolved = 3 * 2 * _SAMPLES * (3 * _CHANNELS * _SIDE) ** 2
    known = {kind: seconds[name] for kind in TYPES if (name := f"{_CONVOLUTION}{kind}") in seconds}
    sizes = f"products of {_ROWS} x {_WIDTH} x {_WIDTH}, convolutions of {_CHANNELS} channels"
    return Roofline(
        "cpu",
        f"this processor, {torch.get_num_threads()} threads",
        {kind: 2 * _ROWS * _WIDTH**2 / seconds[kind] for kind in TYPES if kind in seconds},
        2 * 4 * _COPIED / seconds["copy"],
        convolution={kind: convolved / elapsed for kind, elapsed in known.items()},
        overlaps=False,
        convolution_passes=_PASSES,
        sources=(Source("measured here", f"{sizes}, a copy of {_COPIED >> 18} MiB"),),
    )


def _convolution(dtype: torch.dtype) -> Callable[[], object]:
    """A convolution with its gradients."""
    x = torch.randn(_SAMPLES, _CHANNELS, _SIDE, _SIDE, dtype=dtype, requires_grad=True)
    w = torch.randn(_CHANNELS, _CHANNELS, 3, 3, dtype=dtype, requires_grad=True)
    g = torch.randn(_SAMPLES, _CHANNELS, _SIDE, _SIDE, dtype=dtype)
    return lambda: torch.autograd.grad(F.conv2d(x, w, padding=1), (x, w), g)


def _product(a: Tensor, b: Tensor) -> Callable[[], object]:
    return lambda: a @ b
