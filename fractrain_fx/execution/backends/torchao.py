"""torchao multiplies linear layers in 8 bits, product by product, where it has the numbers of the present stage.

A product that torchao lacks at these bits is the plain backend's, so a stage may raise one product only. Where a device
has no units for MX blocks, torchao's own rounding emulates them, with the numbers of format ``mx``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fractrain_fx.config.products import PRODUCTS, ProductName
from fractrain_fx.execution.arithmetic import AddMatMul, Arithmetic, Bound, Gradients, Linear, MatMul, Needs
from fractrain_fx.execution.autocast import autocast, autocast_dtype
from fractrain_fx.execution.backends.plain import PLAIN
from fractrain_fx.execution.plan import NOTHING_KEPT, Call, Computed, Kept, Plan, contract
from fractrain_fx.execution.torchao_kernels import Kernel, Kind, kernel_of, require_torchao
from fractrain_fx.nn.rounding import gradients_unrounded

__all__ = ["TORCHAO", "Torchao", "not_linear", "torchao_backend"]

_FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_BLOCK = 32

# Sums and rows are filled up to whole blocks. Of a sum over one row, torchao's int8 is wrong on some CPUs with AMX.
_WHOLE: dict[Kind, int] = {"mxfp8": _BLOCK, "int8": 2}


class Torchao:
    """Rounds and multiplies by torchao. The sums of its kernels run in an order of their own."""

    name = "torchao"

    def refuses(self, plan: Plan, call: Call, needs: Needs) -> str | None:
        """The reason that torchao computes no product of a call."""
        needed = True, call.bits is not None and needs[0], call.bits is not None and needs[1]
        kernels = [_kernel(plan, call, product) for product, need in zip(PRODUCTS, needed, strict=True) if need]
        reasons = [kernel for kernel in kernels if isinstance(kernel, str)]
        return reasons[0] if len(reasons) == len(kernels) else None

    def forward(self, plan: Plan, call: Call) -> Computed:
        kernel, by_columns = _kernel(plan, call, "forward"), not isinstance(plan.arithmetic, Linear)
        if isinstance(kernel, str):
            return PLAIN.forward(plan, call)
        if kernel.emulated is not None:
            first = _emulated(call.a, kernel.first, across=False)
            second = _emulated(call.b, kernel.second, across=by_columns)
            return contract(plan, call, first, second), NOTHING_KEPT
        dtype = autocast_dtype(call.a.device.type) or call.a.dtype
        a, b, added = (autocast(tensor, dtype) for tensor in (call.a, call.b, call.added))
        rows = _product(kernel, _matrix(a, across=False), _matrix(b, across=by_columns), "forward")
        out = rows.reshape(*a.shape[:-1], rows.shape[-1])
        return out if added is None else out + added, NOTHING_KEPT

    def backward(self, plan: Plan, call: Call, g: Tensor, kept: tuple[Kept, Kept], needs: Needs) -> Gradients:
        if call.bits is None or gradients_unrounded():
            return PLAIN.backward(plan, call, g, kept, needs)
        of_input, of_weight = (_kernel(plan, call, product, g.dtype) for product in PRODUCTS[1:])
        plain = needs[0] and isinstance(of_input, str), needs[1] and isinstance(of_weight, str), needs[2]
        a, b, added = PLAIN.backward(plan, call, g, kept, plain) if any(plain) else (None, None, None)
        if needs[0] and isinstance(of_input, Kernel):
            a = _input_gradient(plan, call, g, of_input)
        if needs[1] and isinstance(of_weight, Kernel):
            b = _weight_gradient(plan, call, g, of_weight)
        return a, b, added


TORCHAO = Torchao()


def torchao_backend() -> Torchao:
    """The backend, which compiled graphs may then call as well.

    Raises:
        ConfigError: torchao is missing or too old.
    """
    require_torchao()
    for function in (_round_blocks, _multiply):  # Dynamo cannot trace the settings that torchao's functions pass on
        torch.compiler.allow_in_graph(function)
    return TORCHAO


def not_linear(arithmetic: Arithmetic, static: tuple[Any, ...]) -> str | None:
    """The reason that a contraction is not a matrix of rows times a weight; ``None`` if it is."""
    if isinstance(arithmetic, AddMatMul) and static != (1, 1):
        return "scales its product or its added term"
    linear = isinstance(arithmetic, Linear | MatMul | AddMatMul)
    return None if linear else "is not a linear layer, and torchao computes only those"


def _kernel(plan: Plan, call: Call, product: ProductName, dtype: torch.dtype | None = None) -> Kernel | str:
    """What computes a product of a call, or the reason that torchao does not; ``dtype`` is that of its gradient."""
    if call.precision is None:
        return "has bits that only tensors know"
    if not call.a.numel() or call.a.ndim < 2:  # torchao would take the maximum of no values
        return "multiplies a vector, or nothing"
    dtype = dtype or autocast_dtype(call.a.device.type)
    if dtype is None and call.a.dtype != call.b.dtype:
        return "its operands have two types"
    return kernel_of(plan.fmt.recipe, product, call.precision, call.a.device, dtype or call.a.dtype)


def _input_gradient(plan: Plan, call: Call, g: Tensor, kernel: Kernel) -> Tensor:
    """Output gradient times weight, summed over outputs."""
    by_rows = isinstance(plan.arithmetic, Linear)
    if kernel.emulated is None:
        weight = _matrix(call.b.to(g.dtype), across=by_rows)
        return _product(kernel, _matrix(g, across=False), weight, "input_gradient").reshape(call.a.shape)
    error, weight = _emulated(g, kernel.first, across=False), _emulated(call.b, kernel.second, across=by_rows)
    bound = Bound(call.a.to(g.dtype), weight.to(g.dtype), call.added, plan.static)
    return plan.arithmetic.backward(error, bound, (True, False, False))[0]  # type: ignore[return-value]


def _weight_gradient(plan: Plan, call: Call, g: Tensor, kernel: Kernel) -> Tensor:
    """Output gradient times activation, summed over all rows."""
    if kernel.emulated is None:
        rows = _matrix(call.a.to(g.dtype), across=True)
        of_linear = _product(kernel, _matrix(g, across=True), rows, "weight_gradient")
        return of_linear if isinstance(plan.arithmetic, Linear) else of_linear.t()
    error, x = _emulated(g, kernel.first, across=True), _emulated(call.a, kernel.second, across=True)
    bound = Bound(x.to(g.dtype), call.b.to(g.dtype), call.added, plan.static)
    return plan.arithmetic.backward(error, bound, (False, True, False))[1]  # type: ignore[return-value]


def _matrix(x: Tensor, *, across: bool) -> Tensor:
    """A tensor as a matrix whose rows are summed: its last dimension, or ``across`` that, all others."""
    flat = x.reshape(-1, x.shape[-1])
    return flat.t() if across else flat


def _emulated(x: Tensor, element: str, *, across: bool) -> Tensor:
    """A tensor after torchao's rounding to blocks along the rows of its :func:`_matrix`."""
    rounded = _round_blocks(_matrix(x, across=across), element)
    return (rounded.t() if across else rounded).reshape(x.shape).contiguous()


def _round_blocks(rows: Tensor, element: str) -> Tensor:
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

    length, dtype = rows.shape[-1], _FLOAT8[element]
    scales, codes = to_mx(F.pad(rows, (0, -length % _BLOCK)).contiguous(), dtype, _BLOCK)
    values: Tensor = to_dtype(codes, scales, dtype, _BLOCK, rows.dtype)
    return values[:, :length]


def _product(kernel: Kernel, first: Tensor, second: Tensor, product: ProductName) -> Tensor:
    """``first @ second.t()``; zeros that fill up rows and sums change no scale and no result."""
    whole, rows = _WHOLE.get(kernel.kind, 1), first.shape[0]
    more = -first.shape[1] % whole
    if more or rows % whole:
        first, second = F.pad(first, (0, more, 0, -rows % whole)), F.pad(second, (0, more))
    out: Tensor = _multiply(first, second, kernel.kind, kernel.first, kernel.second, product)
    return out[:rows]


def _multiply(first: Tensor, second: Tensor, kind: Kind, to: str, second_to: str, product: ProductName) -> Tensor:
    """The product in numbers of a kind. Compiled graphs hold it as one call of this function, which torch traces."""
    out: Any
    if kind == "bfloat16":
        out = torch.mm(first.bfloat16(), second.bfloat16().t(), out_dtype=first.dtype)
    elif kind == "mxfp8":
        out = torch.mm(_mx(first), _mx(second).t()).to(first.dtype)  # torchao's product gives bfloat16
    elif kind == "int8":
        from torchao.prototype.quantized_training.int8_mixed_precision import scaled_int8_mm

        (codes, scales), (others, of_others) = _int8(first, to), _int8(second, second_to)
        out = scaled_int8_mm(codes, others.t(), scales, of_others)
    else:
        out = torch.mm(*_float8(first, second, to, second_to, product))
    return out  # type: ignore[no-any-return]


def _mx(rows: Tensor) -> Any:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    return MXTensor.to_mx(rows.contiguous(), _FLOAT8["e4m3"], _BLOCK, kernel_preference=KernelPreference.AUTO)


def _int8(rows: Tensor, scale: str) -> tuple[Tensor, Tensor]:
    from torchao.prototype.quantized_training.int8 import quantize_int8_rowwise

    codes, scales = quantize_int8_rowwise(rows if scale == "row" else rows.reshape(1, -1))
    return codes.reshape(rows.shape).contiguous(), scales.expand(len(rows)).contiguous()


def _float8(first: Tensor, second: Tensor, to: str, second_to: str, product: ProductName) -> tuple[Any, Any]:
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import GemmInputRole, LinearMMConfig, ScaledMMConfig

    quick, exact = ScaledMMConfig(use_fast_accum=True, pad_inner_dim=True), ScaledMMConfig(pad_inner_dim=True)
    config = LinearMMConfig(quick, exact, exact)
    x, w, g = GemmInputRole.INPUT, GemmInputRole.WEIGHT, GemmInputRole.GRAD_OUTPUT
    roles = {"forward": (x, w), "input_gradient": (g, w), "weight_gradient": (g, x)}[product]
    a = hp_tensor_to_float8_dynamic(first, _FLOAT8[to], config, gemm_input_role=roles[0])
    b = hp_tensor_to_float8_dynamic(second, _FLOAT8[second_to], config, gemm_input_role=roles[1])
    return a, b.t()
