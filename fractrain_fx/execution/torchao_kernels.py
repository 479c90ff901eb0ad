"""Which of torchao's kernels computes a product, by its recipe, its bits and the device, or why none does."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch.utils._triton import has_triton

from fractrain_fx.config.precision import Precision
from fractrain_fx.config.products import PRODUCTS, ProductName, ProductRecipe, Recipe
from fractrain_fx.errors import ConfigError

__all__ = ["MULTIPLES", "Kernel", "Kind", "kernel_of", "refusal", "require_torchao", "slow"]

Kind = Literal["int8", "float8", "mxfp8", "bfloat16"]

MULTIPLES = {"fp8": 16, "mx": 32}
"""By format, the number that both sizes of a weight must be multiples of, as torch's products ask for."""

_NAMES: dict[Kind, str] = {
    "int8": "torchao int8",
    "float8": "torchao float8",
    "mxfp8": "torchao MXFP8",
    "bfloat16": "torch bfloat16",
}
_KINDS: dict[str, Kind] = {"mx": "mxfp8", "fp8": "float8", "int": "int8"}

# The first GPUs with float8 tensor cores, of NVIDIA (Ada) and of AMD (MI300).
_FLOAT8_CUDA, _FLOAT8_HIP = (8, 9), (9, 4)

# The first GPUs of NVIDIA whose tensor cores multiply bytes.
_INT8_TENSOR_CORES = (7, 5)

# The first GPUs of NVIDIA whose tensor cores multiply MX blocks (Blackwell).
_MX_CUDA = (10, 0)


class Kernel(NamedTuple):
    """How a product is computed.

    Attributes:
        kind: the numbers.
        first, second: what both operands are rounded to: ``e4m3`` or ``e5m2``; under ``int8`` whether each ``row`` has
            a scale, or the ``tensor``.
        emulated: why torchao's rounding and a product in float emulate the kernel; ``None`` where the kernel runs.
    """

    kind: Kind
    first: str
    second: str
    emulated: str | None = None

    def __str__(self) -> str:
        return _NAMES[self.kind] + ("" if self.emulated is None else f" emulated ({self.emulated})")


def kernel_of(
    recipe: Recipe | None, product: ProductName, precision: Precision, device: torch.device, dtype: torch.dtype
) -> Kernel | str:
    """The kernel of a product at a precision, or the reason that there is none."""
    kind = None if recipe is None else _KINDS.get(recipe.formats[PRODUCTS.index(product)])
    if recipe is None or kind is None:
        return "torchao trains in formats mx, fp8 and int"
    first, second = recipe.bits_of(product, precision)
    if first == second == 16:
        if dtype != torch.float32:
            return f"computes in {dtype}, as it would without torchao"
        return refusal("bfloat16", device) or Kernel("bfloat16", "bfloat16", "bfloat16")
    if (first, second) != (8, 8):
        return f"multiplies {first} bits by {second}, and torchao 8 by 8"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"computes in {dtype}"
    return _eight_bits(kind, getattr(recipe, product), device)


def _eight_bits(kind: Kind, how: ProductRecipe, device: torch.device) -> Kernel | str:
    operands = how.first, how.second
    if (
        how.hadamard is not None
        or how.rows is not None
        or any(operand.stochastic or operand.again for operand in operands)
    ):
        return "rounds by chance or after a transform, and torchao rounds to the nearest"
    if any(operand.square or operand.block for operand in operands):
        return "has square blocks, or blocks of another length, which torchao's products lack"
    if kind == "float8" and any(operand.per_row for operand in operands):
        return "has a scale for each row, and torchao's float8 is used with one for the tensor"
    wide = [operand.eight == "e5m2" for operand in operands]
    if all(wide) or (kind == "mxfp8" and any(wide)):
        return "multiplies e5m2, for which torchao has no product here"
    lacks = refusal(kind, device)
    if lacks is not None and not (kind == "mxfp8" and device.type in ("cpu", "cuda")):
        return lacks
    if kind == "int8":
        return Kernel(kind, *("row" if operand.per_row else "tensor" for operand in operands))
    return Kernel(kind, how.first.eight, how.second.eight, lacks)


def require_torchao() -> None:
    """Raise a ``ConfigError`` if torchao is not installed, or is too old."""
    try:
        import torchao.float8.float8_scaling_utils
        import torchao.prototype.mx_formats.mx_tensor
        import torchao.prototype.quantized_training.int8_mixed_precision  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"run.torchao=True needs torchao: pip install 'fractrain_fx[torchao]' ({error}), or leave it out"
        ) from error


def refusal(kind: Kind, device: torch.device) -> str | None:
    """The reason why a device cannot run such products; ``None`` if it can."""
    if device.type == "meta":
        return None
    if device.type not in ("cpu", "cuda"):
        return f"torchao multiplies on CPUs and on GPUs with CUDA or ROCm, not on a device of type {device.type}"
    if kind == "bfloat16":
        return None if device.type == "cuda" else "torch multiplies bfloat16 to float32 on GPUs only"
    if kind == "mxfp8":
        return _no_mxfp8(device)
    if kind == "float8":
        return _no_float8(device) if device.type == "cuda" else None
    # torchao uses a Triton kernel if Triton finds a GPU, and torch._int_mm if not.
    if device.type == "cpu" and has_triton():
        return "Triton finds a GPU, and torchao then multiplies bytes only on that"
    if device.type == "cuda" and not has_triton():
        return "torchao multiplies bytes on a GPU by Triton, which is not installed: pip install triton"
    return None


# The same as `torch.compiler.assume_constant_result`, which would import the compiler here.
refusal._dynamo_marked_constant = True  # type: ignore[attr-defined]


def slow(kind: Kind, device: torch.device) -> str | None:
    """The reason why such products are not quicker than float ones on this kind of device; ``None`` if they may be."""
    if kind == "int8":
        return _lacks_int8(device)
    return "torch multiplies float8 on a CPU in other types" if device.type == "cpu" else None


def _lacks_int8(device: torch.device) -> str | None:
    """The reason why a device has no quick units for bytes; ``None`` if it has."""
    if device.type == "cpu":
        return None if torch.cpu._is_vnni_supported() else "this CPU has no dot products of bytes (VNNI)"
    if torch.version.hip is None:
        quick = torch.cuda.get_device_capability(device) >= _INT8_TENSOR_CORES
        return None if quick else f"{torch.cuda.get_device_name(device)} has no tensor cores for bytes"
    return f"torch cannot multiply matrices of bytes on a device of type {device.type}"


def _no_mxfp8(device: torch.device) -> str | None:
    if device.type == "cpu":
        return "a CPU has no units for MX blocks"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) >= _MX_CUDA:
        return None
    name = torch.cuda.get_device_name(device)
    return f"{name} has no units for MX blocks, which come with compute capability 10.0 (Blackwell)"


def _no_float8(device: torch.device) -> str | None:
    hip = torch.version.hip is not None
    if torch.cuda.get_device_capability(device) >= (_FLOAT8_HIP if hip else _FLOAT8_CUDA):
        return None
    needed = "MI300" if hip else "compute capability 8.9 (Ada, Hopper)"
    return f"{torch.cuda.get_device_name(device)} cannot multiply float8, which needs {needed}"
