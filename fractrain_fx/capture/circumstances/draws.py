"""Random numbers that a model takes from Python or numpy: a graph would repeat those of its recording forever."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn

from fractrain_fx.capture.compare import difference
from fractrain_fx.capture.generators import LEVELS, Generators, drawing
from fractrain_fx.capture.inputs.call import Example
from fractrain_fx.capture.recording.kept.callees import Callee, callees
from fractrain_fx.capture.recording.kept.foreign import is_foreign, same_draws
from fractrain_fx.capture.recording.kept.whole import Whole
from fractrain_fx.capture.recording.patch import plain_paths
from fractrain_fx.capture.recording.writer import Obstacle
from fractrain_fx.capture.state import Snapshot, seeded

__all__ = ["draws"]

_LIBRARIES = ("random", "numpy")


@dataclass
class _Site:
    """A line that draws: the module in whose forward it runs, and the functions and methods around it.

    ``foreign``: the line is in a library function that is always recorded as one call.
    """

    module: str
    line: str
    callees: tuple[Callee, ...] = field(default_factory=tuple)
    foreign: bool = False


def draws(snapshot: Snapshot, example: Example, train: bool, whole: Whole) -> list[Obstacle]:
    """Modules and functions that must stay one call because they compute with random numbers of Python or numpy.

    Args:
        snapshot: the model, restored after each run.
        example: the call to make.
        train: the mode.
        whole: modules and functions that stay one call already, and therefore draw again at every run.
    """
    generators = Generators(snapshot.model)
    with snapshot.preserved(), seeded(), _quiet():
        held = generators.states()[2:]
        owners = _owners(snapshot, generators, example, train)
        holds = generators.states()[2:] != held
    with snapshot.preserved(), seeded(), _quiet():
        sites = _sites(snapshot, generators, example, train, owners)
    # A module whose draws no line shows is kept whole too.
    sites += [_Site(path, "") for path in owners if path not in {site.module for site in sites}]
    left = [site for site in sites if not _stays_one_call(site, whole)]
    if not left or not (holds or _matters(snapshot, example, train)):
        return []
    return [Obstacle(site.module, _cause(site), site.callees, site.line) for site in left]


def _cause(site: _Site) -> str:
    where = f" ({site.line})" if site.line else ""
    return (
        f"it draws random numbers of Python or numpy{where}, which a graph would repeat at every call (drawn with "
        "torch, as by torch.rand, they are part of the graph)"
    )


def _stays_one_call(site: _Site, whole: Whole) -> bool:
    if site.foreign:
        return True
    inside = any(f"{site.module}.".startswith(f"{path}.") for path in whole.modules)
    return inside or any(callee in whole.callees for callee in site.callees)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with plain_paths(), torch.no_grad():
        yield


def _call(snapshot: Snapshot, example: Example, train: bool) -> Any:
    call = example.renewed()
    snapshot.set_mode(train)
    return snapshot.model(*call.args, **call.kwargs)


def _owners(snapshot: Snapshot, generators: Generators, example: Example, train: bool) -> set[str]:
    """Paths of the modules whose own code, not that of a child, drew from a generator."""
    found: set[str] = set()
    running: list[str] = []
    state = generators.states()

    def look() -> None:
        nonlocal state
        now = generators.states()
        if now != state:
            found.add(running[-1] if running else "")
            state = now

    handles = []
    for path, module in snapshot.model.named_modules():

        def enter(_: nn.Module, __: Any, path: str = path) -> None:
            look()
            running.append(path)

        def leave(_: nn.Module, __: Any, ___: Any) -> None:
            look()
            running.pop()

        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        _call(snapshot, example, train)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _sites(snapshot: Snapshot, generators: Generators, example: Example, train: bool, owners: set[str]) -> list[_Site]:
    """The lines of these modules that draw, found by comparing generators at each event of Python's profiler."""
    paths: dict[int, str] = {}
    for path, module in snapshot.model.named_modules():
        paths.setdefault(id(module), path)
    found: dict[tuple[str, str], _Site] = {}
    state = generators.states()

    def event(frame: FrameType, kind: str, _: Any) -> None:
        nonlocal state
        now = generators.states()
        if now == state:
            return
        state = now
        at: FrameType | None = frame.f_back if kind == "call" else frame
        while at is not None and str(at.f_globals.get("__name__", "")).partition(".")[0] in _LIBRARIES:
            at = at.f_back
        if at is None:
            return
        line = f"{at.f_code.co_filename}:{at.f_lineno}"
        module = _module_of(at, paths)
        found.setdefault((module, line), _Site(module, line, tuple(callees(at, paths)), is_foreign(at)))

    handles = []
    before: list[Any] = []
    for path, module in snapshot.model.named_modules():
        # Children that do not draw run unobserved; the generators are compared again when they return.
        watch = event if path in owners else None

        def enter(_: nn.Module, __: Any, watch: Any = watch) -> None:
            before.append(sys.getprofile())
            sys.setprofile(watch)

        def leave(_: nn.Module, __: Any, ___: Any) -> None:
            sys.setprofile(before.pop())

        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    profile = sys.getprofile()
    try:
        _call(snapshot, example, train)
    finally:
        sys.setprofile(profile)
        for handle in handles:
            handle.remove()
    return list(found.values())


def _module_of(frame: FrameType | None, paths: dict[int, str]) -> str:
    """Path of the innermost module of the model whose forward runs."""
    while frame is not None:
        code = frame.f_code
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(first, nn.Module) and id(first) in paths and code.co_name == "forward":
            return paths[id(first)]
        frame = frame.f_back
    return ""


def _matters(snapshot: Snapshot, example: Example, train: bool) -> bool:
    """Whether the outputs depend on the draws. They do not if, for example, the rate of dropped layers is 0."""
    if any(p.is_meta for p in snapshot.model.parameters()):
        return True
    first: Any = None
    for level in LEVELS:
        with snapshot.preserved(), seeded(), drawing(level), same_draws(), _quiet():
            output = _call(snapshot, example, train)
        if level is LEVELS[0]:
            first = output
        elif difference(first, output) is not None:
            return True
    return False
