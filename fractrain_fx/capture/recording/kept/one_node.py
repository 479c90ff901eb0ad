"""Modules, functions and methods that a graph must keep as one node, found in one recording after the other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

from fractrain_fx.capture.recording.kept.callees import Callee
from fractrain_fx.capture.recording.writer import Obstacle
from fractrain_fx.capture.source import forward_line, forward_of, is_within
from fractrain_fx.errors import CaptureError

__all__ = ["OneNodeError", "OneNodes"]


@dataclass
class OneNodes:
    """The modules, functions and methods that stay one node, with reasons, and those that cannot.

    ``met`` has paths of modules whose own code had an obstacle.
    """

    modules: dict[str, str]
    callees: dict[Callee, str] = field(default_factory=dict)
    refused: set[Callee] = field(default_factory=set)
    met: set[str] = field(default_factory=set)

    def add(self, obstacles: Iterable[Obstacle], refused: Iterable[Callee]) -> tuple[dict[str, Obstacle], bool]:
        """Add the obstacles of one recording.

        Gives the modules to keep as one node next, by path, and whether another set of functions is one node now.
        """
        known = set(self.callees), set(self.refused)
        self.refused |= set(refused)
        for function in refused:
            self.callees.pop(function, None)
        modules: dict[str, Obstacle] = {}
        for obstacle in obstacles:
            self.met.add(obstacle.module)
            callee = next((callee for callee in obstacle.callees if callee not in self.refused), None)
            if callee is None:
                modules[obstacle.module] = obstacle
            else:
                self.callees[callee] = obstacle.cause
        return modules, known != (set(self.callees), self.refused)

    def share(self, model: nn.Module) -> float:
        """The share (0..1) of a model's parameters in modules that an obstacle made one node."""
        blamed = self.met & self.modules.keys()
        inside = {p for path in blamed for p in model.get_submodule(path).parameters()}
        return sum(p.numel() for p in inside) / max(1, sum(p.numel() for p in model.parameters()))

    def keep(self, model: nn.Module, found: Mapping[str, Obstacle]) -> None:
        """Keep these modules of ``model`` as one node too; one must be new, and none may be the model itself."""
        new = {path: obstacle.cause for path, obstacle in found.items() if path not in self.modules}
        blamed = "" if "" in new else next(iter(found)) if not new else None
        if blamed is not None:
            module, obstacle = model.get_submodule(blamed), found[blamed]
            kind, line = type(module).__name__, obstacle.line or forward_line(module)
            where = f"module {blamed!r} ({kind})" if blamed else f"{kind} itself"
            at = f", at {line}" if line and line not in obstacle.cause else ""
            raise CaptureError(
                f"{where} cannot be written as a graph: {obstacle.cause}{at}. Move that computation into a submodule "
                "of its own, which is then kept as one node, or switch it off in its config or the example inputs"
                + _largest_part(model, blamed, {*self.modules, *self.met})
            )
        self.modules |= new


def _largest_part(model: nn.Module, path: str, not_graphs: Collection[str]) -> str:
    """Advice to rewrite only the largest part of a module that is not a graph; empty if no part can be a graph."""
    parts = {
        f"{path}.{name}".lstrip("."): sum(p.numel() for p in part.parameters())
        for name, part in model.get_submodule(path).named_children()
        if part._modules and forward_of(type(part)) is not nn.Module.forward
    }
    parts = {part: size for part, size in parts.items() if not any(is_within(inner, {part}) for inner in not_graphs)}
    if not parts:
        return ""
    largest = f"model.{max(parts, key=lambda part: parts[part])}"
    return f"; or rewrite its largest part alone: {largest} = fractrainify({largest}, example_inputs=(...))"


class OneNodeError(Exception):
    """A module, function or method must stay one node; the model is recorded again.

    ``refused`` has functions and methods that cannot be one node; ``compared`` tells whether a run with more samples
    than the example showed this.
    """

    def __init__(self, obstacles: Iterable[Obstacle], refused: Iterable[Callee] = (), compared: bool = False) -> None:
        super().__init__()
        self.obstacles = tuple(obstacles)
        self.refused = frozenset(refused)
        self.compared = compared
