"""Find the innermost module whose recorded calls do not give what the module gives."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Interpreter, Node

from fractrain_fx.capture.checking.check import Mismatch
from fractrain_fx.capture.compare import same_tensor
from fractrain_fx.capture.module import RecordedModule
from fractrain_fx.capture.recording.patch import plain_paths
from fractrain_fx.capture.recording.writer import Return
from fractrain_fx.capture.source import is_within
from fractrain_fx.capture.state import Snapshot, seeded
from fractrain_fx.capture.trees import tensors_in

__all__ = ["locate"]


def locate(
    snapshot: Snapshot,
    recorded: RecordedModule,
    returns: Sequence[Return],
    mismatch: Mismatch,
    graph: Graph | None = None,
) -> str:
    """Path of the module to blame; the root's is the empty string. ``graph``: instead of that of ``recorded``.

    Modules end innermost first, so the first module call whose outputs differ has no differing call inside. If no
    output differs, the last module in the run that owns one of the wrong gradients or buffers is blamed, because
    gradients flow backwards from it.
    """
    if mismatch.names:
        owners = {name.rpartition(".")[0] for name in mismatch.names}
        known = [each.path for each in returns if any(is_within(owner, {each.path}) for owner in owners)]
        return known[-1] if known else ""
    trial, model = mismatch.trial, snapshot.model
    with plain_paths(value_free=True), torch.enable_grad():
        with snapshot.preserved(), seeded(), _outputs(model) as expected:
            snapshot.set_mode(trial.train)
            trial.example.run(model)
        with snapshot.preserved(), seeded():
            snapshot.set_mode(trial.train)
            recorded.set_mode(trial.train)
            wanted = {node for returned in returns for node in returned.nodes if node is not None}
            values = _Values(recorded, graph or recorded.graph, wanted)
            failed = values.run_until_error(*trial.example.renewed().tensors.values())
    calls: dict[str, int] = defaultdict(int)
    for returned in returns:
        call = calls[returned.path]
        calls[returned.path] += 1
        if call >= len(expected[returned.path]):
            return returned.path
        for x, node in zip(expected[returned.path][call], returned.nodes, strict=False):
            if node in values.copies and not same_tensor(x, values.copies[node]):
                return returned.path
    return "" if failed is None else next(reversed(failed.meta["nn_module_stack"]))


@contextlib.contextmanager
def _outputs(model: nn.Module) -> Iterator[dict[str, list[list[Tensor]]]]:
    """Copies of the tensors that each module returns, by path and call."""
    found: dict[str, list[list[Tensor]]] = defaultdict(list)
    with contextlib.ExitStack() as hooks:
        for path, module in model.named_modules():

            def keep(_: nn.Module, __: Any, output: Any, path: str = path) -> None:
                found[path].append([x.detach().clone() for x in tensors_in(output)])

            hooks.enter_context(module.register_forward_hook(keep))
        yield found


class _Values(Interpreter):
    """Runs a graph node by node and keeps copies of some values."""

    def __init__(self, recorded: RecordedModule, graph: Graph, wanted: set[Node]) -> None:
        super().__init__(recorded, graph=graph)
        self._wanted = wanted
        self._now: Node | None = None
        self.copies: dict[Node, Tensor] = {}
        self.extra_traceback = False

    def run_until_error(self, *args: Any) -> Node | None:
        """Run the graph; returns the node that raised, if one did."""
        try:
            self.run(*args)
        except Exception:  # the search is for the node that raises
            return self._now
        return None

    def run_node(self, n: Node) -> Any:
        """Keep a copy of a wanted value."""
        self._now = n
        value = super().run_node(n)
        if n in self._wanted and isinstance(value, Tensor):
            self.copies[n] = value.detach().clone()
        return value
