"""Loads the C++ kernels (``csrc/``), which the machine's compiler builds at their first use."""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import shutil
import stat
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fractrain_fx.durable import user_cache
from fractrain_fx.errors import ConfigError

__all__ = ["SOURCES", "distrusted", "is_built", "kernels", "known_to_compiler", "lacking_programs", "library"]

_LOG = logging.getLogger(__name__)

SOURCES = Path(__file__).with_name("csrc")
"""The folder of the kernels' source."""

_ROOT = 0  # may write anywhere

# Not -march=native: machines of different kinds may share the directory of builds, and must not share a build.
_INSTRUCTIONS = {
    "AVX2": ["-mavx2", "-mfma"],
    "AVX512": ["-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"],
}


@cache
def kernels() -> Any:
    """The ops of ``csrc/``. The first call on a machine builds them, in about a minute, and leaves :func:`library`.

    Raises:
        ConfigError: ninja is missing, or a compiler that can build them, or others may have changed the build.
    """
    file = library()
    needs = "run.backend='cpu' needs a C++ compiler (g++ or clang++) and ninja (pip install ninja)"
    if not is_built() and (lacking := lacking_programs()):
        raise ConfigError(f"{needs}, and there is no {' and no '.join(lacking)} here. Write run.backend='plain'")
    if (reason := distrusted()) is not None:
        raise ConfigError(f"{reason}. Or write run.backend='plain'")
    try:
        if not is_built():
            _build(file)
        torch.ops.load_library(str(file))
    except (RuntimeError, OSError, ImportError) as error:
        raise ConfigError(f"{needs}: {error}. Write run.backend='plain'") from error
    return _Ops()


def known_to_compiler(results: Mapping[str, Callable[..., Any]]) -> Callable[[], bool]:
    """A function that tells torch's compiler what some ops give, at its first call, and returns ``True``.

    A graph that calls the ops asks it first. The compiler runs the function and does not compile it.

    Args:
        results: by the name of an op, a function of the op's arguments that makes results without values.
    """

    @cache
    def register() -> None:
        kernels()
        for name, like in results.items():
            torch.library.register_fake(f"fractrain_fx::{name}", like)

    def known() -> bool:
        register()
        return True

    # `torch.compiler.assume_constant_result` sets this, but calling it would import the compiler with this package.
    known._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return known


def library() -> Path:
    """The file of the build, in ``TORCH_EXTENSIONS_DIR`` or the user's cache.

    A build is for one state of the source, one version of torch and one kind of processor. Each copy of the source and
    each environment has its own, because the compiler's commands name their folders and ninja rebuilds everything when
    a command changes.
    """
    places = [str(SOURCES), sys.prefix]
    state = "\n".join([*(file.read_text() for file in _files()), torch.__version__, *_flags(), *places])
    name = f"fractrain_fx_{hashlib.sha256(state.encode()).hexdigest()[:12]}"
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or user_cache() / "torch_extensions")
    return root / name / f"{name}.so"


def is_built() -> bool:
    """Whether an earlier :func:`kernels`, maybe of another process, has finished the build."""
    file = library()
    return file.exists() and _mark(file).exists()


def distrusted() -> str | None:
    """Why the build may be another user's work, with a way out; ``None`` if it belongs to this user (or to root) alone.

    A library is code, so it is loaded only from a folder to which nobody else may write.
    """
    if not hasattr(os, "getuid"):
        return None
    file = library()
    for path in (file.parent, file):
        if not path.exists():
            continue
        about = path.stat()
        if about.st_uid not in (os.getuid(), _ROOT):
            return (
                f"{path} belongs to another user, so its code is not loaded: set TORCH_EXTENSIONS_DIR to a folder of "
                "your own"
            )
        if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return (
                f"others may write to {path}, so its code is not loaded: remove {file.parent} (it is built again), or "
                "chmod -R go-w it if nobody has"
            )
    return None


def lacking_programs() -> list[str]:
    """The programs that build the kernels and that are not here."""
    compiler, *_ = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    return [program for program in (compiler, "ninja") if shutil.which(program, path=_search_path()) is None]


def _build(file: Path) -> None:
    mask = os.umask(stat.S_IWGRP | stat.S_IWOTH)
    os.umask(mask | stat.S_IWGRP | stat.S_IWOTH)  # nobody else may write to what is built here
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if (reason := distrusted()) is not None:  # another user made it just now
            raise ConfigError(reason)
        _build_in(file)
    finally:
        os.umask(mask)


def _build_in(file: Path) -> None:
    import fcntl  # Unix has it, and compilers that take these flags

    from torch.utils import cpp_extension  # looks for compilers when imported

    with (file.parent / "building").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # the system lets go of it when a process dies; torch's own lock would stay
        if is_built():
            return
        (file.parent / "lock").unlink(missing_ok=True)
        _LOG.info("building the C++ kernels into %s, which takes about a minute", file.parent)
        sources = [str(source) for source in _files() if source.suffix == ".cpp"]
        folder = str(file.parent)
        before, os.environ["PATH"] = os.environ.get("PATH", os.defpath), _search_path()
        try:
            cpp_extension.load(
                file.stem, sources, extra_cflags=_flags(), build_directory=folder, is_python_module=False
            )
        finally:
            os.environ["PATH"] = before
        _mark(file).touch()


def _search_path() -> str:
    """Folders of programs, and that of Python: pip leaves ninja there, whether the environment is active or not."""
    return os.pathsep.join((os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)))


def _mark(file: Path) -> Path:
    """Exists once the library is whole: the linker of a process that was killed may leave a part of it."""
    return file.with_name("complete")


def _files() -> list[Path]:
    return sorted(file for file in SOURCES.iterdir() if file.suffix in (".cpp", ".h"))


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
        if torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx():
            flags += ["-mamx-tile", "-mamx-int8"]
    return flags if sys.platform == "darwin" else [*flags, "-fopenmp"]
