"""A plain module that computes as evaluation does, for deployment."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from fractrain_fx.capture import Recording
from fractrain_fx.capture.inputs.examples_hf import is_hugging_face
from fractrain_fx.export.factors import FrozenOp
from fractrain_fx.export.graph import DeployedGraph, frozen_graph
from fractrain_fx.export.layers import attention_names, attentions, layers, with_rounded_layers

__all__ = ["deploy"]


def deploy(original: nn.Module, recording: Recording, ops: Sequence[FrozenOp], skipped: Collection[str]) -> nn.Module:
    """The original class with rounded layers, if that covers all products, else the evaluation graph.

    A model of Hugging Face's always keeps its class, so that ``generate`` works; its products that stay float are named
    in ``float_products``.

    Args:
        original: the model that was recorded.
        recording: with its shown graphs.
        ops: its rounded products.
        skipped: blocks that every sample skips.
    """
    found, attention = layers(original, ops), attentions(ops)
    names = {*(op.name for op in found.values()), *attention_names(attention)}
    left = tuple(op.name for op in ops if op.name not in names)
    if skipped or (left and not is_hugging_face(original)):
        made: Any = DeployedGraph(frozen_graph(original, recording.eval, ops, skipped=skipped), recording).eval()
        left = ()
    else:
        made = with_rounded_layers(original, found, attention)
    made.float_products = left
    return made  # type: ignore[no-any-return]
