"""The devices on which torchao's 8-bit products run, and those on which they save no time."""

from __future__ import annotations

import torch
from torch.utils._triton import has_triton

from fractrain_fx.config import Torchao

__all__ = ["refusal", "slow"]

# The first GPUs with float8 tensor cores, of NVIDIA (Ada) and of AMD (MI300).
_FLOAT8_CUDA, _FLOAT8_HIP = (8, 9), (9, 4)

# The first GPUs of NVIDIA whose tensor cores multiply bytes.
_INT8_TENSOR_CORES = (7, 5)

# The first GPUs of NVIDIA whose tensor cores multiply MX blocks (Blackwell).
_MX_CUDA = (10, 0)


def refusal(kind: Torchao, device: torch.device) -> str | None:
    """The reason why a device cannot run such products, with the way out; ``None`` if it can."""
    if device.type == "meta":
        return None
    if device.type not in ("cpu", "cuda"):
        return f"torchao multiplies on CPUs and on GPUs with CUDA or ROCm, not on a device of type {device.type}"
    if kind == "mxfp8":
        return _no_mxfp8(device)
    if kind == "float8":
        return _no_float8(device) if device.type == "cuda" else None
    # torchao uses a Triton kernel if Triton finds a GPU, and torch._int_mm if not.
    if device.type == "cpu" and has_triton():
        return (
            "Triton finds a GPU, and torchao then multiplies bytes only on that: write model.to('cuda'), start with "
            "CUDA_VISIBLE_DEVICES=''"
        )
    if device.type == "cuda" and not has_triton():
        return "torchao multiplies bytes on a GPU by Triton, which is not installed: pip install triton"
    return None


def slow(kind: Torchao, device: torch.device) -> str | None:
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
        return "torchao multiplies MXFP8 on GPUs only, and the model is on a CPU: write model.to('cuda')"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) >= _MX_CUDA:
        return None
    name = torch.cuda.get_device_name(device)
    return f"{name} cannot multiply MXFP8, which needs compute capability 10.0 (Blackwell): take another GPU"


def _no_float8(device: torch.device) -> str | None:
    hip = torch.version.hip is not None
    if torch.cuda.get_device_capability(device) >= (_FLOAT8_HIP if hip else _FLOAT8_CUDA):
        return None
    needed = "MI300" if hip else "compute capability 8.9 (Ada, Hopper)"
    return f"{torch.cuda.get_device_name(device)} cannot multiply float8, which needs {needed}: take another GPU"
