"""What DFQ adds to a step, as compiled kernels for a CPU: samples of several widths, and the gradient of their choice.

One pass over memory instead of one an op. torch's own compiler makes them at their first use in a process, for all
shapes (sums of rows above 4096 values are another kernel), and keeps them on disk. Whole tensors of one width need no
such kernel: they take three passes in place, and a call of a compiled one costs as much as it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from fractrain_fx.errors import ConfigError
from fractrain_fx.formats.affine_grid import SMALLEST_SCALE
from fractrain_fx.formats.bits import readable
from fractrain_fx.precision import FLOAT_BITS

__all__ = ["gains_compiled", "round_compiled"]

# Below so many values a call of a compiled kernel costs as much as the passes that it saves.
_SMALLEST = 1 << 13

# What a kernel is compiled on: large, as that decides over how many threads it runs, and of sizes that differ, as
# equal ones would be taken for always equal.
_EXAMPLE = 300, 7000


def round_compiled(
    x: Tensor, widths: Sequence[int], lo: Tensor, span: Tensor, noise: Tensor | None, out: Tensor | None
) -> Tensor | None:
    """Each sample rounded to its own width, in the same float32 operations as by itself; ``None`` where not fit.

    Args:
        x: values that all lie in the range, samples first.
        widths: of the samples; 0 and 32 leave them as they are.
        lo: low end of the range (one element).
        span: its width (one element).
        noise: to be added to the level numbers, of the shape of ``x``.
        out: memory for the result.
    """
    if lo.numel() > 1 or len(widths) != len(x) or not _fits(x, lo):
        return None
    if noise is not None and not x.is_contiguous():
        x = out = x.contiguous()  # the order of the noise is that of the dimensions
    elif out is None or out.stride() != x.stride():
        out = torch.empty_like(x) if out is None else out
        x = x if out.stride() == x.stride() else out.copy_(x)
    if not _in_rows(x):
        return None
    tops = [0.0 if width in (0, FLOAT_BITS) else 2.0**width - 1 for width in widths]
    wide = float(span)
    scales = [max(wide / (top or 1.0), SMALLEST_SCALE) for top in tops]
    columns = torch.tensor([scales, tops]).view(2, -1, 1)
    rows = _rows(x)
    target = rows if x is out else _rows(out)
    kernel = _rounding(noise is not None, x is out)
    kernel(rows, target, lo.view(1, 1).data, *columns.unbind(), 0.0 if noise is None else _rows(noise))
    return out


def gains_compiled(x: Tensor, g: Tensor, bits: Sequence[int], lo: Tensor, span: Tensor) -> Tensor | None:
    """What :func:`~fractrain_fx.formats.affine_gains.affine_gains` gives, for values that all lie in the range."""
    if g.dtype != x.dtype or not _fits(x, lo):
        return None
    wide = float(span)
    scales = torch.tensor([max(wide / (2.0**each - 1), SMALLEST_SCALE) for each in bits])
    found: Tensor = _gaining(len(bits))(_rows(x.contiguous()), _rows(g.contiguous()), lo.view(1, 1).data, scales)
    return found


def _fits(x: Tensor, lo: Tensor) -> bool:
    large = x.numel() >= _SMALLEST and len(x) > 1
    return large and x.dtype == lo.dtype == torch.float32 and readable(x)


def _in_rows(x: Tensor) -> bool:
    """Whether the values of each sample fill one piece of memory, sample behind sample."""
    reach = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride != reach:
            return False
        reach *= size
    return x.stride(0) * len(x) == x.numel()


def _rows(x: Tensor) -> Tensor:
    """Samples as rows, and as no view: a compiled function looks at what its inputs are views of."""
    columns = x.numel() // len(x)
    return x.as_strided((len(x), columns), (columns, 1)).data


def _round(x: Tensor, out: Tensor, lo: Tensor, scale: Tensor, top: Tensor, noise: Tensor | float) -> None:
    """Nothing is rounded where the highest level is 0."""
    q = ((x - lo) / scale + noise).clamp(min=0)
    out.copy_(torch.where(top > 0, torch.minimum(q, top).round() * scale + lo, x))


def _gains(x: Tensor, g: Tensor, lo: Tensor, scales: Tensor) -> Tensor:
    offset = x - lo
    errors = [(offset / scale).round() * scale - offset for scale in scales.unbind()]
    return torch.stack([(error * g).sum(1) for error in errors], dim=1)


@cache
def _rounding(noisy: bool, in_place: bool) -> Callable[..., None]:
    x = torch.zeros(_EXAMPLE)
    lo, scale, top = torch.zeros(1, 1), torch.ones(len(x), 1), torch.ones(len(x), 1)
    return _compiled(_round, x, x if in_place else x.clone(), lo, scale, top, x.clone() if noisy else 0.0)


@cache
def _gaining(options: int) -> Callable[..., Tensor]:
    x = torch.zeros(_EXAMPLE)
    return _compiled(_gains, x, x.clone(), torch.zeros(1, 1), torch.ones(options))


def _compiled(kernel: Callable[..., Any], *example: Any) -> Callable[..., Any]:
    """``kernel``, compiled on an example; of a code object of its own, as torch counts what it compiles for each."""
    from torch._inductor import exc  # takes a second to import

    assert isinstance(kernel, FunctionType)
    own = FunctionType(kernel.__code__.replace(co_name=kernel.__name__), kernel.__globals__)
    compiled = torch.compile(own, dynamic=True, fullgraph=True)
    try:
        compiled(*example)
    except (exc.InductorError, exc.CppCompileError, exc.InvalidCxxCompiler) as error:
        raise ConfigError(
            f"rounding='compiled' needs a C++ compiler that torch.compile can use: {error}. Write rounding='eager'"
        ) from error
    return compiled
