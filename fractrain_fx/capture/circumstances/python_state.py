"""The Python state that recordings depend on or leave out, and what goes from one recording to another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, permutations
from typing import Any

import torch

from fractrain_fx.capture.circumstances.access import Access
from fractrain_fx.capture.compare import difference, overwritten, same
from fractrain_fx.capture.inputs.call import Example
from fractrain_fx.capture.inputs.data import has_data
from fractrain_fx.capture.recording.patch import plain_paths
from fractrain_fx.capture.recording.writer import Obstacle
from fractrain_fx.capture.source import around, listed
from fractrain_fx.capture.state import Snapshot, seeded

__all__ = ["PythonState", "carried_between", "last_output", "set_across"]


@dataclass(frozen=True)
class PythonState:
    """The Python state that a recording depends on or leaves out.

    The values of the attributes ``read`` decided what was recorded. Those of ``begun`` were read before the run set
    them, and ``written`` are those that it set to other values. ``notes`` are warnings about harmless things that the
    graph leaves out. ``types``: code read the floating type of a tensor, so that the graph may have this type as a
    constant. ``checkpointed``: code asked for activation checkpointing, which a graph does not have.
    """

    read: tuple[Access, ...] = ()
    notes: tuple[str, ...] = ()
    begun: tuple[Access, ...] = ()
    written: tuple[Access, ...] = ()
    types: bool = False
    checkpointed: bool = False

    @classmethod
    def joined(cls, parts: Iterable[PythonState]) -> PythonState:
        """The state of several recorded runs together, each entry once."""
        parts = tuple(parts)
        read = {access.key: access for part in parts for access in reversed(part.read)}
        notes = dict.fromkeys(note for part in parts for note in part.notes)
        searched = [access for part in parts for access in part.read if not access.read_at]
        moved = {str(access): None for access in searched if overwritten(access.value, access.present())}
        if moved:
            notes[
                f"forward, or a function that it calls, changes {listed(moved)} from call to call, which the rewritten "
                "model does not: let the model hold in a buffer what its numbers depend on"
            ] = None
        flags = (any(part.types for part in parts), any(part.checkpointed for part in parts))
        begun = tuple(chain.from_iterable(part.begun for part in parts))
        written = tuple(chain.from_iterable(part.written for part in parts))
        return cls(tuple(read.values()), tuple(notes), begun, written, *flags)

    def crossing(self, other: PythonState) -> Iterator[tuple[Access, Access]]:
        """Attributes that this run sets and the other begins with: a graph carries nothing from call to call.

        Not those that both set alike, as a table that whichever call comes first makes, and not counters.
        """
        begun = {access.key: access for access in other.begun if not access.only_counts}
        for access in self.written:
            reader = begun.get(access.key)
            if reader is not None and not (reader.set_at and same(access.left, reader.left)):
                yield access, reader


def set_across(states: Mapping[bool, PythonState], snapshot: Snapshot, example: Example) -> list[Obstacle]:
    """Modules that set in one mode what they read in the other, if the example's output shows it."""
    obstacles = []
    for first, second in ((True, False), (False, True)):
        crossing = list(states[first].crossing(states[second]))
        if not crossing or (has_data(snapshot.model) and _same_after(snapshot, example, first, second)):
            continue
        names = {True: "train", False: "eval"}
        for access, reader in crossing:
            cause = (
                f"it sets {access.place} in {names[first]} mode ({access.line}) and reads it in {names[second]} mode, "
                "which a graph does not carry over: hold it in a buffer"
            )
            path = around([access.place.module, *access.writers, *reader.readers])
            obstacles.append(Obstacle(path, cause, line=access.line))
    return obstacles


def _same_after(snapshot: Snapshot, example: Example, first: bool, second: bool) -> bool:
    """Whether a call in the second mode gives the same after one in the first as it does alone."""
    alone = last_output(snapshot, [(second, example)])
    return difference(alone, last_output(snapshot, [(first, example), (second, example)])) is None


def last_output(snapshot: Snapshot, calls: Sequence[tuple[bool, Example]], *, trained: bool = False) -> Any:
    """The output of the last of several calls, each with its mode; only what the model's code keeps lies between them.

    ``trained``: the weights are halved before the last one.
    """
    model, mode = snapshot.model, None
    with snapshot.preserved(), plain_paths(), torch.no_grad():
        for place, (train, call) in enumerate(calls, 1):
            if train is not mode:
                snapshot.set_mode(train)
                mode = train
            snapshot.restore_tensors()
            for p in model.parameters() if trained and place == len(calls) else ():
                p.copy_(p / 2)
            with seeded():
                output = call.run(model)
    return output


def carried_between(states: Iterable[PythonState]) -> Iterator[str]:
    """A warning about attributes that calls of one recording set and those of another read."""
    crossing = [access for one, other in permutations(states, 2) for access, _ in one.crossing(other)]
    if crossing:
        names = listed(dict.fromkeys(map(str, crossing)))
        yield (
            f"forward sets {names} in some calls and reads it in others, and the rewritten model carries nothing from "
            "one call to another: hold it in a buffer"
        )
