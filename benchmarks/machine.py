"""Describe the hardware of a measurement: enough to compare, and nothing about the owner."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from fractrain_fx.execution.codes.kept import processor

__all__ = ["describe", "device_name", "versions"]


def describe(device: str) -> dict[str, str]:
    """Processor (and GPU), threads and their binding, versions."""
    bound = os.environ.get("OMP_PROC_BIND", "").lower() not in ("", "false")
    facts = {
        "processor": f"{processor()}, {os.cpu_count()} cores, {_instructions()}",
        "threads": f"{torch.get_num_threads()}, {'bound to cores' if bound else 'not bound'}",
    }
    if device == "cuda":
        facts["gpu"] = device_name(device)
    return facts | versions("torch")


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python and of the installed ones of some packages."""
    installed = {"python": platform.python_version()}
    for package in packages:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed


def device_name(device: str) -> str:
    """The GPU's product name, or the processor's."""
    return torch.cuda.get_device_name() if device == "cuda" else processor()


def _instructions() -> str:
    """The instruction set of torch's kernels, and the processor's units for small numbers."""
    units = {
        "VNNI": torch.cpu._is_vnni_supported(),
        "bfloat16": torch.cpu._is_avx512_bf16_supported(),
        "AMX": torch.cpu._is_amx_tile_supported(),
    }
    return ", ".join([torch.backends.cpu.get_cpu_capability(), *(name for name, there in units.items() if there)])
