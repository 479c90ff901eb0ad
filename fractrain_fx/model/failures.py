"""Explain why a rewritten model fails on a call: the node that failed, and inputs that differ from the recording."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from fractrain_fx.capture import RecordedModule, Recording
from fractrain_fx.capture.circumstances.structure import SHARDED_ELSEWHERE
from fractrain_fx.capture.model_errors import is_out_of_memory
from fractrain_fx.capture.recording.regions import regions_left
from fractrain_fx.capture.source import error_line
from fractrain_fx.capture.trees import tensors_in
from fractrain_fx.config import RunConfig
from fractrain_fx.engine.distributed import LOST, is_lost_process, syncs_batch_norm
from fractrain_fx.errors import FracTrainError, InputError, ModelError, RunError
from fractrain_fx.model.eager_code import eager_forward
from fractrain_fx.passes import facts

__all__ = ["differences_in_words", "no_more_recordings", "other_differences", "refused_again", "run_graph"]

# Errors that torch and models raise for sizes that do not fit. Torch uses other exceptions to stop a run early, as in
# activation checkpointing.
_OF_SIZES = (RuntimeError, ValueError, TypeError, LookupError, AssertionError, ArithmeticError)
_TRANSFORMED = (
    "torch.jit.trace (which TensorBoard's add_graph calls) and the transforms of torch.func do not pass through "
    "rounding, which has gradients of its own: trace model.restore() instead, take gradients with loss.backward() or "
    "torch.autograd.grad, and a graph of the rewritten model with torch.export.export(model, inputs)"
)
_SHOWN = 4  # inputs in a message


def run_graph(graph_module: RecordedModule, values: Sequence[Any], recording: Recording) -> Any:
    """Call a rewritten graph.

    Args:
        graph_module: the graph to call.
        values: for its placeholders.
        recording: has the inputs that the model was recorded on.

    Raises:
        InputError: the graph fails on inputs of other shapes or types than the recorded ones; names the node.
        ModelError: its parameters are sharded, and nothing gathers them; or torch traces or transforms the call.
        RunError: another process is gone.
    """
    if torch.compiler.is_compiling():
        return graph_module(*values)
    try:
        with regions_left():
            return eager_forward(graph_module)(graph_module, *values)  # hooks belong to the rewritten model
    except (FracTrainError, torch.AcceleratorError):
        raise
    except _OF_SIZES as error:
        if is_out_of_memory(error):
            raise
        if is_lost_process(error):
            raise RunError(LOST) from error
        if "DTensor" in str(error):
            raise ModelError(SHARDED_ELSEWHERE) from error
        if torch._C._get_tracing_state() is not None or torch._C._functorch.peek_interpreter_stack() is not None:
            raise ModelError(_TRANSFORMED) from error
        place = _place(error)
        differences = differences_in_words(recording, values)
        if differences is None:
            error.add_note(f"fractrain_fx: raised in {place}, on inputs of the recorded shapes")
            raise
        raise InputError(
            f"the rewritten model fails on these inputs: {type(error).__name__}: {error}. It failed in {place}. The "
            f"inputs differ from the recorded ones: {differences}. Pass inputs like the recorded ones, or rewrite the "
            "model on inputs like these: fractrainify(model.restore(), example_inputs=...)"
        ) from error.with_traceback(None)  # its lines are those of generated code


def differences_in_words(recording: Recording, values: Sequence[Any]) -> str | None:
    """The recorded and the present form of the inputs that differ, in words; ``None`` if all are as recorded."""
    differences = list(_differences(recording, values))
    return ("; ".join(differences[:_SHOWN]) + (" ..." if len(differences) > _SHOWN else "")) or None


def other_differences(values: Sequence[Any], *, around: bool) -> str:
    """In words, how a call differs whose inputs have the recorded form; ``around``: in the settings around it."""
    shapes = ", ".join(str(tuple(x.shape)) for x in tensors_in(values))
    return "modes or settings around it" if around else f"inputs of shape {shapes}, with other values"


def no_more_recordings(original: nn.Module, count: int, run: RunConfig) -> str | None:
    """The reason that a model with ``count`` recordings cannot be recorded again; ``None`` if it can."""
    if count >= run.recordings:
        return (
            f"It has {count} recordings already: set RunConfig(recordings=...) higher, pad inputs to a few sizes, or "
            "move that code into a submodule"
        )
    if syncs_batch_norm(original):
        return "Batch norms that wait for other processes cannot be recorded in one process: pass inputs of one size"
    return None


def refused_again(error: FracTrainError) -> str:
    """The reason that a model cannot be recorded for a call, and the way out."""
    cause = error.__cause__
    if cause is None or isinstance(cause, FracTrainError):
        return f"It cannot be recorded again for this call: {error}"
    line = error_line(cause)
    return (
        f"The model itself refuses these inputs: {type(cause).__name__}: {str(cause).rstrip('.')}"
        f"{f' ({line})' if line else ''}. Pass inputs of the recorded size, or build the model for these "
        "(many take img_size or image_size) and call fractrainify on it"
    )


def _place(error: Exception) -> str:
    """The node whose call raised ``error``, in words."""
    node = _failed_node(error)
    if node is None:
        return "the graph"
    stack = node.meta.get("nn_module_stack") or {"": None}
    path = next(reversed(stack)) or "the model's own code"
    op = facts(node).op
    name = f"op {op.name!r}" if op is not None else f"node {node.name!r}"
    source = node.meta.get("source")
    return f"{name} of {path}" + (f", recorded from {source}" if source else "")


def _failed_node(error: Exception) -> Node | None:
    """The node of the innermost recorded graph that ran."""
    failed, trace = None, error.__traceback__
    while trace is not None:
        graph_module = trace.tb_frame.f_locals.get("self")
        if isinstance(graph_module, RecordedModule) and trace.tb_frame.f_code in _codes(graph_module):
            lines = graph_module.code.splitlines()
            line = lines[trace.tb_lineno - 1] if trace.tb_lineno <= len(lines) else ""
            name = line.partition("=")[0].partition(":")[0].strip()
            failed = next((node for node in graph_module.graph.nodes if node.name == name), failed)
        trace = trace.tb_next
    return failed


def _codes(graph_module: RecordedModule) -> tuple[Any, Any]:
    """The code that blocks and the compiler call, and the one for eager mode: both have the lines of the graph."""
    return type(graph_module).forward.__code__, eager_forward(graph_module).__code__


def _differences(recording: Recording, values: Sequence[Any]) -> Iterator[str]:
    """The tensors of a call whose shape or type differs from the recorded call."""
    for name, before, now in zip(recording.call.placeholders, recording.inputs, values, strict=True):
        pairs = list(zip(tensors_in(before), tensors_in(now), strict=False))
        for index, (x, y) in enumerate(pairs):
            if (x.shape, x.dtype) != (y.shape, y.dtype):
                part = f"tensor {index + 1} of {name}" if len(pairs) > 1 else name
                yield f"{part} was {_described(x)} and is {_described(y)}"


def _described(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
