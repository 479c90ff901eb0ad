"""Find the modules and functions that compute with random numbers of Python or numpy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from fractrain_fx.capture.compare import difference
from fractrain_fx.capture.inputs.call import Example
from fractrain_fx.capture.recording.kept.callees import callees, placed
from fractrain_fx.capture.recording.kept.one_node import OneNodes
from fractrain_fx.capture.recording.patch import plain_paths
from fractrain_fx.capture.recording.writer import Obstacle
from fractrain_fx.capture.replaced import replaced
from fractrain_fx.capture.source import is_within, outward, package_of
from fractrain_fx.capture.state import LEVELS, Generators, Snapshot, seeded, set_level

__all__ = ["foreign_draws"]

_LIBRARIES = ("random", "numpy")


def foreign_draws(snapshot: Snapshot, example: Example, train: bool, one_nodes: OneNodes) -> list[Obstacle]:
    """Modules and functions that must stay one call because they compute with random numbers of Python or numpy.

    Those in ``one_nodes`` stay one call already, and draw again at every run.
    """
    generators = Generators(snapshot.model)
    with snapshot.preserved(), seeded(), plain_paths(), torch.no_grad():
        held = generators.states()[2:]
        sites = _sites(snapshot, generators, example, train)
        moved = generators.states()[2:] != held
    left = [
        site
        for site in sites
        if not is_within(site.module, one_nodes.modules)
        and not any(callee in one_nodes.callees for callee in site.callees)
    ]
    if not left or not (moved or _matters(snapshot, example, train, one_nodes)):
        return []
    # Once functions that draw stay one call, the other draws may turn out to decide nothing.
    return [site for site in left if set(site.callees) - one_nodes.refused] or left


def _sites(snapshot: Snapshot, generators: Generators, example: Example, train: bool) -> list[Obstacle]:
    """The lines that draw, found by comparing generators whenever a function is called or returns."""
    paths = {id(module): path for path, module in snapshot.model.named_modules()}
    sites: dict[tuple[str, str], Obstacle] = {}
    state = generators.states()

    def event(frame: FrameType, kind: str, _: Any) -> None:
        nonlocal state
        if (now := generators.states()) == state:
            return
        state = now
        # Functions of numpy's compiled code send no event, so a call shows that its caller drew before.
        frame = frame.f_back or frame if kind == "call" else frame
        at = next((outer for outer in outward(frame) if package_of(outer) not in _LIBRARIES), frame)
        line, module = f"{at.f_code.co_filename}:{at.f_lineno}", _module_of(at, paths)
        cause = (
            f"it draws random numbers of Python or numpy ({line}), which a graph would repeat at every call (drawn "
            "with torch, as by torch.rand, they are part of the graph)"
        )
        sites.setdefault((module, line), Obstacle(module, cause, tuple(callees(at, paths)), line))

    snapshot.set_mode(train)
    profile = sys.getprofile()
    sys.setprofile(event)
    try:
        example.run(snapshot.model)
    finally:
        sys.setprofile(profile)
    return list(sites.values())


def _module_of(frame: FrameType, paths: dict[int, str]) -> str:
    """Path of the innermost module of the model whose forward runs."""
    for outer in outward(frame):
        code = outer.f_code
        first = outer.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(first, nn.Module) and id(first) in paths and code.co_name == "forward":
            return paths[id(first)]
    return ""


def _matters(snapshot: Snapshot, example: Example, train: bool, one_nodes: OneNodes) -> bool:
    """Whether the outputs depend on the draws. They do not if, for example, the rate of dropped layers is 0.

    Functions that stay one call draw the same numbers each time.
    """
    if any(p.is_meta for p in snapshot.model.parameters()):
        return True
    first: Any = None
    functions = [(callee.name, *placed(callee, snapshot.model)) for callee in one_nodes.callees]
    same = [(owner, name, _with_a_seed(real)) for name, owner, real in functions]
    for level in LEVELS:
        with snapshot.preserved(), seeded(), replaced(*same), plain_paths(), torch.no_grad():
            snapshot.set_mode(train)
            set_level(level)
            output = example.run(snapshot.model)
        if first is None:
            first = output
        elif difference(first, output) is not None:
            return True
    return False


def _with_a_seed(real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with seeded():
            return real(*args, **kwargs)

    return call
