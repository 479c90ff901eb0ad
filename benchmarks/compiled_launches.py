"""Count the kernels that a compiled training step launches on a GPU, without a GPU.

Inductor generates the code of the step for Triton, as it does for a GPU, from tensors on the CPU. The calls in that
code are counted. No Triton kernel is compiled or run, so the step's numbers mean nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.config as inductor
import triton
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import run_fw_bw_and_get_code
from triton.backends.compiler import GPUTarget

__all__ = ["compiled_launches"]

_CALLS = re.compile(
    r"\b(triton)_\w+\.run\("  # a fused kernel
    r"|\b(extern_kernels\.\w+)\("  # a matrix product
    r"|= torch\.ops\.\w+\.(\w+)\.\w+\("  # an operator that Inductor calls as it is
)


def compiled_launches(
    model: Callable[[Tensor], Any], step: Callable[[Callable[[Tensor], Any]], Tensor]
) -> Counter[str]:
    """The launches of a step, by the kind of kernel.

    Args:
        model: what ``torch.compile`` compiles, on the CPU and without C++ kernels.
        step: calls the compiled model and gives the loss.
    """
    torch.compiler.reset()
    with _as_for_a_gpu():
        compiled = torch.compile(model, fullgraph=True)
        _, codes = run_fw_bw_and_get_code(lambda: step(compiled))
    torch.compiler.reset()
    return Counter(next(filter(None, call)) for code in codes for call in _CALLS.findall(code))


@contextmanager
def _as_for_a_gpu() -> Iterator[None]:
    """Inductor generates Triton kernels of an H100, and calls of them do nothing."""
    with (
        inductor.patch(cpu_backend="triton", fx_graph_cache=False),
        patch.object(type(triton.runtime.driver), "active", _Driver()),
        patch.object(AsyncCompile, "triton", lambda *args, **options: _Kernel()),
    ):
        yield


class _Driver:
    """What Inductor asks a Triton driver for while it generates code."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class _Kernel:
    """Stands for a compiled Triton kernel."""

    def run(self, *args: Any, **options: Any) -> None:
        pass
