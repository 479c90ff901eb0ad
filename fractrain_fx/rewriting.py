"""Run a chain of passes over what was recorded of a model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.fx.passes.infra.pass_base import PassBase
from torch.fx.passes.infra.pass_manager import PassManager

from fractrain_fx.capture import RecordedModule, Recording
from fractrain_fx.errors import FracTrainError, ModelError, PassError
from fractrain_fx.passes import FIXED_BATCH, TRAINED
from fractrain_fx.passes.graph.edit import NAMESPACE

__all__ = ["rewrite_graphs"]


def rewrite_graphs(model: nn.Module, recording: Recording, passes: Sequence[PassBase]) -> None:
    """Run a chain over the graph of each mode; what it inserts goes where the model's parameters are.

    Raises:
        ModelError: nothing to quantize or to gate.
        FracTrainError: what a pass raises.
    """
    try:
        for graph_module in recording.graphs:
            if graph_module is not recording.train:
                graph_module.meta[TRAINED] = recording.train
            _run(graph_module, recording, passes)
        recording.eval.meta.pop(TRAINED, None)
    except ModelError as error:
        if not recording.leaves:
            raise
        told = f"{error}. Kept as one node each, so that nothing in them can be chosen: {_told(recording)}"
        raise ModelError(told) from None
    place = next((p.device for p in model.parameters()), None)
    inserted = recording.train._modules.get(NAMESPACE)
    if inserted is not None and place is not None and place.type != "meta":
        inserted.to(place)


def _told(recording: Recording) -> str:
    """The modules that were kept whole, the largest first, with reasons."""
    held = {path: sum(p.numel() for p in recording.train.get_submodule(path).parameters()) for path in recording.leaves}
    largest = sorted(held, key=lambda path: -held[path])[:3]
    rest = len(held) - len(largest)
    told = "; ".join(f"{path!r} ({recording.leaves[path]})" for path in largest)
    return told + (f"; and {rest} more" if rest else "")


def _run(graph_module: RecordedModule, recording: Recording, passes: Sequence[PassBase]) -> None:
    examples = recording.call.bind(recording.args, recording.kwargs)
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    for node, value in zip(placeholders, examples, strict=True):
        node.meta["example"] = value
    graph_module.meta[FIXED_BATCH] = recording.fixed_batch
    try:
        with graph_module.edited():
            PassManager(passes=list(passes))(graph_module)
    except Exception as error:
        # torch's manager wraps whatever a pass raises; users get the error itself.
        cause = error.__cause__
        if isinstance(cause, FracTrainError):
            raise cause from None
        if cause is None:
            raise
        raise PassError(
            f"{error}: {type(cause).__name__}: {cause}. The recorded graph runs on the example inputs as they are; a "
            "pass also runs it with more samples and with other values. Try example inputs of several samples that "
            "differ; if that does not help, please report the model"
        ) from cause
    for node in placeholders:
        node.meta.pop("example", None)
