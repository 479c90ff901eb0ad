"""Loads the C++ kernels (``csrc/``), which the machine's compiler builds at their first use."""

from __future__ import annotations

import hashlib
import logging
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fractrain_fx.errors import ConfigError

__all__ = ["kernels"]

_LOG = logging.getLogger(__name__)

_SOURCES = Path(__file__).with_name("csrc")

# Not -march=native: machines of different kinds may share the directory of builds, and must not share a build.
_INSTRUCTIONS = {
    "AVX2": ["-mavx2", "-mfma"],
    "AVX512": ["-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"],
}


@cache
def kernels() -> Any:
    """The ops of ``csrc/``.

    The first call builds them, in half a minute, and leaves the build on disk (``TORCH_EXTENSIONS_DIR``, by default in
    the user's cache). A build is for one state of the source, one version of torch and one kind of processor. Each
    copy of the source and each environment has its own, because the compiler's commands name their folders and ninja
    rebuilds everything when a command changes.

    Raises:
        ConfigError: ninja is missing, or a compiler that can build them.
    """
    files = sorted(file for file in _SOURCES.iterdir() if file.suffix in (".cpp", ".h"))
    flags = _flags()
    places = [str(_SOURCES), sys.prefix]
    state = "\n".join([*(file.read_text() for file in files), torch.__version__, *flags, *places])
    name = f"fractrain_fx_{hashlib.sha256(state.encode()).hexdigest()[:12]}"
    sources = [str(file) for file in files if file.suffix == ".cpp"]
    try:
        from torch.utils import cpp_extension  # looks for compilers when imported

        _LOG.info("loading the kernels of rounding='compiled'; building them for the first time takes a while")
        cpp_extension.load(name, sources, extra_cflags=flags, is_python_module=False)
    except (RuntimeError, OSError, ImportError) as error:
        raise ConfigError(
            f"rounding='compiled' needs a C++ compiler (g++ or clang++) and ninja (pip install ninja): {error}. "
            "Write rounding='eager'"
        ) from error
    return _Ops()


class _Ops:
    """Each op as its only overload: torch's search for the overload at every call takes longer than a small op."""

    def __getattr__(self, name: str) -> Any:
        op = getattr(torch.ops.fractrain_fx, name).default
        setattr(self, name, op)
        return op


def _flags() -> list[str]:
    # -ffp-contract=off: a fused multiply-add rounds once less than the formula, and would give other numbers.
    flags = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
    capability = torch.backends.cpu.get_cpu_capability()
    flags += _INSTRUCTIONS.get(capability, [])
    if capability == "AVX512" and torch.cpu._is_vnni_supported():
        flags.append("-mavx512vnni")
    return flags if sys.platform == "darwin" else [*flags, "-fopenmp"]
