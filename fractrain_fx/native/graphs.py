"""C++ ops in graphs of ``torch.compile``, which has to know the shapes of their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from fractrain_fx.native.build import kernels

__all__ = ["known_to_compiler"]


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
