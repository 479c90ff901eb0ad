"""The settings of how a model runs: they change its speed and memory, and at most details of its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

from fractrain_fx.config.clock import Amount, parse_amount
from fractrain_fx.config.kinds import check_kinds
from fractrain_fx.errors import ConfigError, near

__all__ = [
    "CODE_BITS",
    "LEFT_OUT_FROM",
    "TORCHAO_FORMATS",
    "Backend",
    "MemoryFormat",
    "RunConfig",
]

Backend = Literal["auto", "plain", "cpu", "cuda", "codes", "codes-always"]
Skipping = Literal["computed", "left-out"]
MemoryFormat = Literal["auto", "preserve"]

# The most bits of a code that products of codes multiply, which is one byte.
CODE_BITS = 8

# Share of skipped samples from which the gathered form of a block was measured to be faster (docs/how-to/execution.md).
LEFT_OUT_FROM = 0.1

# The formats that torchao has kernels for, at 8 bits.
TORCHAO_FORMATS = ("mx", "fp8", "int")


@dataclass(frozen=True)
class RunConfig:
    """How a model runs, and for how long.

    Attributes:
        backend: what rounds, finds ranges, multiplies, and computes gates and their gradient. ``plain``: torch
            operations. ``cuda``: on a GPU Triton kernels, for format ``affine``; elsewhere as ``plain``. ``cpu``: on a
            CPU C++ kernels, for ``affine`` and block formats, built at their first use; on a GPU as ``cuda``.
            ``codes``: as ``cpu``, and a CPU with AVX2 or AVX-512 multiplies what ``affine`` rounds to at most 8 bits as
            integers, with the same results, if a short timing finds that quicker than float. Each shape and each width
            is timed as it first trains. ``codes-always``: the same wherever possible, without a timing. ``auto``:
            ``cpu`` on a CPU where the kernels were built before, else ``cuda`` where Triton is installed, else
            ``plain``; ``fractrain train`` builds them for a long run (docs/how-to/execution.md).
        torchao: whether torchao computes linear layers of ``static`` and ``pfq`` under formats ``mx``, ``fp8`` and
            ``int``, at the bits that it has kernels for (docs/how-to/torchao.md).
        skipping: what blocks do for samples that skip them. ``computed``: they run for all samples, and the result is
            dropped. ``left-out``: these samples are left out if that saves time, from a tenth of the batch on. A number
            is another share (0..1) of the batch. Values stay the same, except that batch norm and ranges inside a block
            only see the samples that run, noise is drawn for these alone, and a sample that skips a block has no
            gradient through it (docs/how-to/execution.md).
        memory_format: ``auto``: on a CPU, convolutions of images and the layers between them compute in
            ``torch.channels_last``, which is quicker. ``preserve``: in the order of inputs and weights.
        batch_axis: dimension of the model's inputs that holds the samples.
        recordings: most recordings of one model, for calls with other arguments and sizes that take another path.
        compared_calls: of each recording, the number of first calls with other sizes that are compared with the model
            itself, because code may read a size in a way that recording does not see. The first call with another type,
            layout or setting of torch is always compared; 0 compares no call.
        compare_every: of so many calls, one is compared with the model itself (and the calls 8, 16, 32, ... before),
            because something that its code reads may change without being seen (a file, a function that is replaced); 0
            compares first calls alone.
        length: length of the run: a number of epochs, or ``Steps(1000)`` or ``Tokens(1_000_000)`` in the unit of the
            schedule's ``every``. ``fractrain train`` sets it; Hugging Face's and Lightning's trainers know it, unless
            the unit is tokens.
    """

    backend: Backend = "auto"
    torchao: bool = False
    skipping: Skipping | float = "computed"
    memory_format: MemoryFormat = "auto"
    batch_axis: int = 0
    recordings: int = 8
    compared_calls: int = 16
    compare_every: int = 500
    length: int | Amount | None = None

    def __post_init__(self) -> None:
        check_kinds(self, "run.")
        if isinstance(self.skipping, bool) or not isinstance(self.skipping, Real):
            words = get_args(Skipping)
            if self.skipping not in words:
                offer = near(str(self.skipping), words)
                raise ConfigError(
                    f"run.skipping={self.skipping!r} is unknown: write one of {', '.join(words)}, or a share of the "
                    f"batch.{offer}"
                )
        elif not 0 <= self.skipping <= 1:
            raise ConfigError(f"run.skipping={self.skipping} must lie in 0..1, the share of a batch")
        for name, least, means in (
            ("batch_axis", 0, "count dimensions from the first"),
            ("compared_calls", 0, "0 compares no call"),
            ("compare_every", 0, "0 compares first calls alone"),
            ("recordings", 1, "a model is recorded once"),
        ):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"run.{name}={value} must be at least {least}: {means}")
        object.__setattr__(self, "length", _length(self.length))

    @property
    def epochs(self) -> int | None:
        """The length of the run in epochs; ``None`` if it is in another unit, or not known."""
        return self.length if isinstance(self.length, int) else None

    @property
    def uses_codes(self) -> bool:
        """Whether products of integers are asked for."""
        return self.backend in ("codes", "codes-always")

    @property
    def left_out_from(self) -> float | None:
        """The share of skipped samples from which they are left out; ``None``: they are computed."""
        if isinstance(self.skipping, str):
            return LEFT_OUT_FROM if self.skipping == "left-out" else None
        return self.skipping


def _length(value: Any) -> int | Amount | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        if value is not None and value < 1:
            raise ConfigError(f"run.length={value} must be at least 1 epoch")
        return value
    return parse_amount("run.length", value)
