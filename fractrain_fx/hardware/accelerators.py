"""Accelerators by name, with figures from their vendors' data sheets: dense, per board, accumulated in 32 bits."""

from __future__ import annotations

from fractrain_fx.hardware.roofline import Roofline, Source

__all__ = ["ACCELERATORS"]

_MAMF = "ml-engineering (Bekman), Maximum Achievable Matmul FLOPS comparison table, bfloat16"
_TERA, _GIGA = 1e12, 1e9

# Vendors do not print which share of the peak products reach. Boards without a published measurement get the median of
# the others. The share of the bandwidth is ours for all boards (docs/reference/machines.md).
_COMPUTES = 0.80
_STREAMS = 0.85


def _board(
    name: str,
    title: str,
    peak: dict[str, float],
    gigabytes: float,
    watts: float,
    *sources: tuple[str, str],
    computes: float = _COMPUTES,
) -> Roofline:
    """A row of the table; ``peak`` in 10^12 operations a second, memory in 10^9 bytes a second."""
    return Roofline(
        name,
        title,
        {kind: _TERA * rate for kind, rate in peak.items()},
        _GIGA * gigabytes,
        watts,
        computes,
        _STREAMS,
        tuple(Source(*source) for source in sources),
    )


_AMPERE = {"float32": 19.5, "tf32": 156, "bfloat16": 312, "float16": 312, "int8": 624, "int4": 1248}
_HOPPER = {"float32": 67, "tf32": 494.5, "bfloat16": 989.5, "float16": 989.5, "fp8": 1979, "int8": 1979}

ACCELERATORS: tuple[Roofline, ...] = (
    _board(
        "a100",
        "NVIDIA A100 80GB SXM",
        _AMPERE,
        2039,
        400,
        ("NVIDIA A100 Tensor Core GPU Datasheet", "peaks, memory, power"),
        ("NVIDIA A100 Tensor Core GPU Architecture whitepaper", "int4"),
        (_MAMF, "85.9 % of the peak"),
        computes=0.859,
    ),
    _board(
        "h100",
        "NVIDIA H100 SXM",
        _HOPPER,
        3350,
        700,
        ("NVIDIA H100 Tensor Core GPU Datasheet", "half of the peaks with sparsity; memory, power"),
        (_MAMF, "80.1 % of the peak"),
        computes=0.801,
    ),
    _board(
        "h200",
        "NVIDIA H200 SXM",
        _HOPPER,
        4800,
        700,
        ("NVIDIA H200 Tensor Core GPU Datasheet", "half of the peaks with sparsity; memory, power"),
        (_MAMF, "80.3 % of the peak (row H100/H200)"),
        computes=0.803,
    ),
    _board(
        "b200",
        "NVIDIA B200 (HGX)",
        {
            "float32": 75,
            "tf32": 1125,
            "bfloat16": 2250,
            "float16": 2250,
            **{"fp8": 4500, "mxfp8": 4500, "int8": 4500, "mxfp4": 9000, "nvfp4": 9000},
        },
        8000,
        1000,
        ("NVIDIA HGX Platform specifications, HGX B200", "an eighth of the board's peaks, half of those with sparsity"),
        ("NVIDIA DGX B200 Datasheet", "an eighth of 64 TB/s"),
        ("NVIDIA Blackwell Architecture Technical Brief", "power"),
        (_MAMF, "77.6 % of the peak"),
        computes=0.776,
    ),
    _board(
        "mi300x",
        "AMD Instinct MI300X",
        {"float32": 163.4, "tf32": 653.7, "bfloat16": 1307.4, "float16": 1307.4, "fp8": 2614.9, "int8": 2614.9},
        5300,
        750,
        ("AMD Instinct MI300X Accelerator Data Sheet", "peaks, memory, power"),
        (_MAMF, "60.1 % of the peak"),
        computes=0.601,
    ),
    _board(
        "rtx4090",
        "NVIDIA GeForce RTX 4090",
        {
            "float32": 82.6,
            "tf32": 82.6,
            "bfloat16": 165.2,
            "float16": 165.2,
            **{"fp8": 330.3, "int8": 660.6, "int4": 1321.2},
        },
        1008,
        450,
        ("NVIDIA Ada GPU Architecture whitepaper, appendix A", "peaks, memory, power"),
    ),
    _board(
        "rtx3090",
        "NVIDIA GeForce RTX 3090",
        {"float32": 35.6, "tf32": 35.6, "bfloat16": 71, "float16": 71, "int8": 284, "int4": 568},
        936,
        350,
        ("NVIDIA Ampere GA102 GPU Architecture whitepaper, appendix A", "peaks, memory, power"),
    ),
    _board(
        "l4",
        "NVIDIA L4",
        {"float32": 30.3, "tf32": 60, "bfloat16": 121, "float16": 121, "fp8": 242.5, "int8": 242.5},
        300,
        72,
        ("NVIDIA L4 Tensor Core GPU Datasheet", "half of the peaks with sparsity; memory, power"),
    ),
)
