"""Write calls with arguments that have no form in generated code: a closure keeps these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fractrain_fx.capture.recording.effects import Watch
from fractrain_fx.capture.sizes.symbolic import SymbolicFloat, SymbolicInt
from fractrain_fx.capture.targets import function_node
from fractrain_fx.capture.trees import map_tree

if TYPE_CHECKING:
    from fractrain_fx.capture.recording.recorder import Recorder

__all__ = ["write_closed"]


@dataclass(frozen=True)
class _Slot:
    """The place of a tensor or a size among the arguments of a node."""

    place: int


def write_closed(
    recorder: Recorder,
    name: str,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    result: Any,
    watched: Watch,
) -> Any:
    """Write a call by a closure that keeps all arguments but tensors and sizes."""
    given: list[Any] = []

    def slot(value: Any) -> Any:
        if not isinstance(value, (Tensor, SymbolicInt, SymbolicFloat)):
            return value
        given.append(value)
        return _Slot(len(given) - 1)

    kept_args, kept_kwargs = map_tree(args, slot), map_tree(dict(kwargs), slot)

    def call(*values: Any) -> Any:
        def fill(value: Any) -> Any:
            return values[value.place] if isinstance(value, _Slot) else value

        return func(*map_tree(kept_args, fill), **map_tree(kept_kwargs, fill))

    return recorder.write(
        "call_function", function_node(call, name.strip("_") or "call"), tuple(given), {}, result, watched
    )
