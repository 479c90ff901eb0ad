"""What a graph cannot hold and therefore keeps as one node, found in one recording after the other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fractrain_fx.capture.callees import Callee
from fractrain_fx.capture.writer import Obstacle

__all__ = ["KeepWholeError", "Whole"]


@dataclass
class Whole:
    """What stays one node: modules by path, functions and methods, each with the reason; and what cannot be one."""

    modules: dict[str, str]
    callees: dict[Callee, str] = field(default_factory=dict)
    refused: set[Callee] = field(default_factory=set)

    def add(self, obstacles: Iterable[Obstacle], refused: Iterable[Callee]) -> dict[str, str]:
        """Take in what one recording met.

        Returns:
            The modules that are to be kept whole next, by path with the reason.
        """
        self.refused |= set(refused)
        for each in refused:
            self.callees.pop(each, None)
        modules: dict[str, str] = {}
        for obstacle in obstacles:
            callee = next((each for each in obstacle.callees if each not in self.refused), None)
            if callee is None:
                modules[obstacle.module] = obstacle.cause
            else:
                self.callees[callee] = obstacle.cause
        return modules


class KeepWholeError(Exception):
    """Something must stay one node; the model is recorded again.

    Attributes:
        obstacles: modules, functions and methods, with reasons.
        refused: functions and methods that cannot be one node.
        compared: whether this came out in a run with more samples than the example has.
    """

    def __init__(self, obstacles: Iterable[Obstacle], refused: Iterable[Callee] = (), compared: bool = False) -> None:
        super().__init__()
        self.obstacles = tuple(obstacles)
        self.refused = frozenset(refused)
        self.compared = compared
