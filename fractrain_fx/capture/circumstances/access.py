"""One attribute or variable that a model's code reads or sets: its place, its value, and the lines of code."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from torch import Tensor

from fractrain_fx.capture.circumstances.holders import parts_of
from fractrain_fx.capture.trees import PLAIN

__all__ = ["ABSENT", "COMPARED", "Access", "AttributePath"]

COMPARED = (*PLAIN, tuple, list, dict, set, frozenset)
"""Types of values that are compared with what they were."""

_Line = tuple[CodeType, int]


class ABSENT:
    """Stands for an attribute that an object does not have. It is a class, so that a copy of it is the same object."""


@dataclass(frozen=True)
class AttributePath:
    """The place of an attribute in the model; ``module`` is a path.

    ``held`` is the name of the module's object (a configuration) that has the attribute, with dots for an object inside
    an object; ``""`` if the module has it.
    """

    module: str
    held: str
    name: str

    def __str__(self) -> str:
        return ".".join(part for part in (self.module, self.held, self.name) if part)


@dataclass
class Access:
    """The use of one attribute in one recorded run; ``value`` is its value when it was first read or set.

    If ``carried``, the run read it before setting it, so that its value from before the run matters. ``readers`` and
    ``writers`` are paths of the modules in whose forward it was read or set. A ``shared`` one belongs to a file, a
    class or a function, and so to every copy of the model. ``by_value``: code read a tensor as a number, so that its
    values matter and not only which tensor it is. ``left`` is its value at the end of the run.
    """

    holder: Any
    place: AttributePath
    value: Any
    carried: bool
    shared: bool = False
    by_value: bool = False
    left: Any = ABSENT
    readers: set[str] = field(default_factory=set)
    writers: set[str] = field(default_factory=set)
    read_at: set[_Line] = field(default_factory=set)
    set_at: set[_Line] = field(default_factory=set)

    @property
    def key(self) -> tuple[int, str]:
        """The same for every use of one attribute."""
        return id(self.holder), self.place.name

    @property
    def only_counts(self) -> bool:
        """Whether every line that reads it sets it too, as ``self.n += 1`` does."""
        return bool(self.set_at) and self.read_at <= self.set_at

    @property
    def line(self) -> str:
        """File and line that set it, or read it."""
        code, line = sorted(self.set_at or self.read_at, key=lambda at: at[1])[0]
        return f"{code.co_filename}:{line}"

    def __str__(self) -> str:
        return f"{self.place} ({self.line})" if self.set_at or self.read_at else str(self.place)

    def present(self) -> Any:
        """The present value of the attribute."""
        return getattr(self.holder, self.place.name, ABSENT)

    def contents(self) -> list[Tensor]:
        """The tensors in its present value, if that is a container."""
        value = self.present()
        return [] if isinstance(value, Tensor) else [part for part in parts_of(value) if isinstance(part, Tensor)]
