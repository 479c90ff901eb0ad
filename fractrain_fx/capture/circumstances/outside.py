"""Watch what a recorded run does outside torch: Python attributes that it reads or sets, foreign random numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from io import IOBase
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph

from fractrain_fx.capture.circumstances.access import Access
from fractrain_fx.capture.circumstances.attributes import Attributes
from fractrain_fx.capture.circumstances.draws import foreign_draws
from fractrain_fx.capture.circumstances.python_state import PythonState, last_output
from fractrain_fx.capture.compare import copied, difference, overwritten, same
from fractrain_fx.capture.inputs.call import Example
from fractrain_fx.capture.inputs.data import has_data
from fractrain_fx.capture.model_errors import model_errors
from fractrain_fx.capture.recording.kept.one_node import OneNodes
from fractrain_fx.capture.recording.patch import plain_paths
from fractrain_fx.capture.recording.recorder import Recorder
from fractrain_fx.capture.recording.writer import Obstacle
from fractrain_fx.capture.source import is_within, listed
from fractrain_fx.capture.state import Generators, Snapshot, seeded
from fractrain_fx.capture.trees import CONTAINERS

__all__ = ["Outside"]


class Outside:
    """Watches one recorded run."""

    def __init__(self, model: nn.Module, recorder: Recorder) -> None:
        self._recorder = recorder
        self._attributes = Attributes(model, recorder)
        self._generators = Generators(model)
        self._changed: list[Access] = []
        self._left: list[Access] = []
        self._filled: list[Access] = []
        self._set: list[Access] = []
        self._drew = False
        self._notes: list[str] = []

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """Watch the run inside, and note the changes at its end."""
        before = self._generators.states()
        with self._attributes.observed():
            yield
        self._drew = self._generators.states() != before
        with self._recorder.pause():  # these comparisons are no calls of the model
            self._changed = self._attributes.carried()
            self._left = self._attributes.left_behind()
            self._filled = self._attributes.filled()
            self._set = self._attributes.set_otherwise()

    def obstacles(self, snapshot: Snapshot, example: Example, train: bool, one_nodes: OneNodes) -> list[Obstacle]:
        """Modules and functions that must stay one call because the model's next run would differ from this one."""
        obstacles = self._shown_by_two_calls(snapshot, example, train) if self._changed or self._filled else []
        if self._drew:
            obstacles += foreign_draws(snapshot, example, train, one_nodes)
        return obstacles + list(self._set_from_outside())

    def _shown_by_two_calls(self, snapshot: Snapshot, example: Example, train: bool) -> list[Obstacle]:
        """Modules that a second call on the same inputs shows to depend on the first; notes what both leave behind."""

        def noted() -> tuple[list[Any], list[list[Tensor]]]:
            return [copied(access.present()) for access in self._changed], [table.contents() for table in self._filled]

        try:
            outputs, drawn, ((first, second), tensors) = _two_calls(snapshot, example, train, noted)
        except model_errors():  # a second call that fails tells nothing about the first
            self._left += self._filled
            return []
        self._left += _refilled(self._filled, *tensors)
        differs, follows = False, True
        if has_data(snapshot.model):
            # A table of random numbers is drawn by the first call only: the second leaves the generator elsewhere.
            differs = difference(*outputs) is not None or difference(*drawn) is not None
            differs = differs or not _same_after(snapshot, example, train)
            follows = differs or _same_after(snapshot, example, train, trained=True)
        obstacles, self._notes = _carried(self._changed, first, second, differs)
        if not follows or (differs and not obstacles):
            self._notes.append(
                f"forward keeps values of its first call in {listed(map(str, self._changed or self._filled))}, and the "
                "rewritten model computes them at every call: its results differ once weights or inputs have changed"
            )
        return obstacles

    def _set_from_outside(self) -> Iterator[Obstacle]:
        """Attributes of a called part that recorded code outside this part sets: the graph would not set them."""
        called = {str(node.target) for node in self._recorder.writer.graph.nodes if node.op == "call_module"}
        for access in self._attributes.accesses.values():
            outside = [path for path in access.writers if self._is_shown([path], called)]
            shown = self._is_shown([access.place.module], called)
            if not outside or shown or isinstance(access.present(), Tensor):  # the graph sets tensors
                continue
            if len(outside) < len(access.writers) or not same(access.value, access.present()):
                cause = f"it sets {access.place} of a part that stays one call, which a graph does not do"
                yield Obstacle(outside[0], cause, line=access.line)

    def state(self, graph: Graph, notes: Iterable[str]) -> PythonState:
        """The Python state that ``graph`` has fixed, with more notes. Modules that it calls read attributes again."""
        called = {str(node.target) for node in graph.nodes if node.op == "call_module"}
        read = [access for access in self._attributes.accesses.values() if self._decided(access, called)]
        read += self._attributes.variables
        constants = [name for name in self._recorder.reads.constants if name.startswith("frac.")]
        numbers = {id(self._recorder.writer.additions.tensor(name)) for name in constants}
        for access in read:
            access.by_value = isinstance(access.value, Tensor) and id(access.value) in numbers
        texts = list(self._notes)
        left = [access for access in self._left if self._is_shown([access.place.module], called)]
        # Variables of Python's modules are noted for recorded code only, without the module whose forward it is.
        if left := [access for access in left if self._is_shown((access.writers or access.readers) or [""], called)]:
            texts.append(
                f"forward leaves values in {listed(map(str, left))}, which the rewritten model does not set: return "
                "them from forward if a loss or a log needs them"
            )
        taken = [
            access for access in read if isinstance(access.value, Iterator) and not isinstance(access.value, IOBase)
        ]
        if taken:
            texts.append(
                f"forward reads {listed(map(str, taken))}, which gives each item once: recording took some, and the "
                "rewritten model takes none; hold a list and count in a buffer"
            )
        begun = [access for access in self._attributes.accesses.values() if access.carried]
        return PythonState(
            tuple(read),
            (*texts, *notes),
            tuple(access for access in begun if self._is_shown(access.readers, called)),
            tuple(access for access in self._set if self._is_shown(access.writers, called)),
            self._recorder.ambient.floating,
            self._recorder.checkpointed,
        )

    def _decided(self, access: Access, called: set[str]) -> bool:
        # An attribute that the forward changes is kept up to date by the forward itself.
        if not access.carried or any(access is changed for changed in self._changed):
            return False
        return self._is_shown(access.readers, called)

    @staticmethod
    def _is_shown(paths: Iterable[str], called: set[str]) -> bool:
        """Whether the graph has the code of one of these modules, instead of a call of the module."""
        return not all(is_within(path, called) for path in paths)


def _carried(
    changed: list[Access], first: list[Any], second: list[Any], differs: bool
) -> tuple[list[Obstacle], list[str]]:
    """Find modules that must stay one call, or need a warning, because of attributes that a recorded run changed.

    The next call would begin with the changed values, whereas a graph begins every call with the recorded ones. A table
    that is made at the first call and kept needs neither: a second call finds it and gives the same output. The
    warnings are about counters that nothing else reads. A container that only grows may be a log; if the model reads
    it, the outputs differ.

    Args:
        changed: the attributes.
        first: their values after a first call.
        second: their values after a second call on the same inputs.
        differs: whether its output differs from the first one's.
    """
    pairs = list(zip(changed, first, second, strict=True))
    moving = [access for access, *now in pairs if not isinstance(now[0], CONTAINERS) and not same(*now)]
    rewritten = [access for access, *now in pairs if isinstance(now[0], CONTAINERS) and overwritten(*now)]
    counters = [access for access in moving if access.only_counts]
    blamed = [access for access in (changed if differs else moving) if access not in counters]
    if differs and not blamed:
        blamed, counters = counters, []
    obstacles = []
    for access in blamed:
        cause = f"its forward changes {access.place} from call to call ({access.line}), which a graph cannot repeat"
        obstacles += [Obstacle(path, cause, line=access.line) for path in sorted(access.writers or access.readers)[-1:]]
    notes = [
        f"forward counts in {access.place} ({access.line}), and no other line of it reads the count: the rewritten "
        "model does not count"
        for access in counters
    ]
    notes += [
        f"forward changes values in {access} from call to call, which the rewritten model does not"
        for access in rewritten
        if not blamed
    ]
    return obstacles, notes


def _same_after(snapshot: Snapshot, example: Example, train: bool, *, trained: bool = False) -> bool:
    """Whether a call on other values gives the same after a call on the example, as it does with a table of sizes.

    ``trained``: the weights change between the calls, and not the inputs.
    """
    other = example if trained else example.with_other_values(moved=True)
    if other is None:
        return True
    alone = last_output(snapshot, [(train, other)], trained=trained)
    after = last_output(snapshot, [(train, example), (train, other)], trained=trained)
    return difference(alone, after) is None


def _refilled(filled: list[Access], first: list[list[Tensor]], second: list[list[Tensor]]) -> list[Access]:
    """The containers into which a second call puts tensors of its own, unlike a table that the first one filled."""
    first_ids = [set(map(id, tensors)) for tensors in first]
    return [
        access for access, ids, now in zip(filled, first_ids, second, strict=True) if not ids.issuperset(map(id, now))
    ]


def _two_calls(
    snapshot: Snapshot, example: Example, train: bool, noted: Callable[[], tuple[Any, ...]]
) -> tuple[list[Any], list[Any], list[tuple[Any, ...]]]:
    """The outputs of two calls on the same inputs, torch's generators after both, and the pairs of what is noted."""
    model = snapshot.model
    outputs: list[Any] = []
    drawn: list[Any] = []
    after: list[tuple[Any, ...]] = []
    with snapshot.preserved(), plain_paths(), torch.no_grad():
        snapshot.set_mode(train)
        for _ in range(2):
            snapshot.restore_tensors()
            with seeded():
                outputs.append(example.run(model))
                states = [generator.get_state() for generator in torch.cuda.default_generators]
                drawn.append([torch.get_rng_state(), *states])
            after.append(noted())
    return outputs, drawn, list(zip(*after, strict=True))
