"""Attention's probabilities, which backward computes again from queries and keys, as torch's fused attention does.

Their number grows with the square of the length. Kept, they are the largest tensors of a Transformer that reads long
texts. Computing them again takes one more product of queries and keys.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fractrain_fx.execution.autocast import autocast_dtype, autocasting
from fractrain_fx.execution.fused_op import FusedOp
from fractrain_fx.execution.plan import Call
from fractrain_fx.execution.remade import Made, Remaking
from fractrain_fx.formats.scratch import Latest
from fractrain_fx.nn.attention import attention_probabilities
from fractrain_fx.nn.rounding import refuse_create_graph

__all__ = ["Probabilities"]

_latest = Latest()


class Probabilities(nn.Module):
    """The part of attention between its two products; nothing of it is kept for backward.

    Args:
        scores: the fused op in front of it.
    """

    def __init__(self, scores: FusedOp) -> None:
        super().__init__()
        # In a tuple, which torch does not register as children: the op has a name already.
        self._scores = (scores,)
        self._latest: tuple[Tensor, ProbabilitiesRecipe, list[Tensor | None]] | None = None

    def forward(
        self,
        scores: Float[Tensor, "*batch queries keys"],
        query: Tensor,
        given: Mapping[str, Any],
        factors: tuple[Any, ...],
    ) -> Float[Tensor, "*batch queries keys"]:
        """As :func:`attention_probabilities`.

        Args:
            scores: what the fused op gave.
            query: the queries.
            given: mask, dropout, causality and scale.
            factors: the arguments that the fused op was called with.
        """
        op = self._scores[0]
        given = dict(given)
        if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and scores.requires_grad):
            return attention_probabilities(scores, query, **given)
        mask = given.pop("attn_mask", None)
        tensors, measured_here = op.call_of(*factors)[2].flatten()
        recipe = ProbabilitiesRecipe(op, measured_here, given, scores)
        tensors = [mask, *(tensor if tensor is None else tensor.detach() for tensor in tensors)]
        probabilities: Tensor = _Probabilities.apply(scores, query, recipe, *tensors)
        self._latest = probabilities, recipe, tensors
        return probabilities

    def recipe_of(self, operand: Tensor, made: Made) -> tuple[Remaking, Sequence[Tensor | None]] | None:
        """How to make the latest probabilities again, and from what; asked for once."""
        latest, self._latest = self._latest, None
        return None if latest is None or latest[0] is not operand else latest[1:]


class ProbabilitiesRecipe:
    """How probabilities are made again.

    Args:
        op: computes the scores.
        measured_here: for both its factors, whether the range was measured on it.
        given: dropout, causality and scale.
        scores: the scores, for their device.
    """

    def __init__(self, op: FusedOp, measured_here: tuple[bool, bool], given: Mapping[str, Any], scores: Tensor) -> None:
        self._op, self._measured_here, self.given = op, measured_here, given
        self._autocast = autocast_dtype(scores.device.type)
        self._generators = _generators(scores.device) if given.get("dropout_p") else None

    def make(self, *tensors: Tensor | None) -> Tensor:
        """The probabilities, bit for bit, from the mask and the tensors of the scores' call."""
        return self.graph(*tensors)[1].detach()

    def graph(self, *tensors: Tensor | None) -> tuple[list[Tensor], Tensor]:
        """The scores and a trained mask as leaves, and the probabilities that autograd sees made from them."""
        mask, *of_call = tensors
        call = Call.unflatten(of_call, self._measured_here)
        graph: tuple[list[Tensor], Tensor] | None = _latest.of(call.a, self)
        if graph is not None:
            return graph
        device = call.a.device
        with autocasting(device.type, self._autocast), self._same_noise(device):
            with torch.no_grad():
                backend = self._op.choose(call, (False, False, False))
                scores = backend.forward(self._op.plan, call)[0]
            leaves = [scores.requires_grad_()]
            if mask is not None and mask.requires_grad:
                mask = mask.detach().requires_grad_()
                leaves.append(mask)
            with torch.enable_grad():
                graph = leaves, attention_probabilities(scores, call.a, mask, **self.given)
        _latest.keep(call.a, self, graph)
        return graph

    @contextlib.contextmanager
    def _same_noise(self, device: torch.device) -> Iterator[None]:
        if self._generators is None:
            yield
            return
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.set_rng_state(self._generators[0])
            if device.type == "cuda":
                torch.cuda.set_rng_state(self._generators[1], device)
            yield


def _generators(device: torch.device) -> tuple[Tensor, ...]:
    host = torch.get_rng_state()
    return (host, torch.cuda.get_rng_state(device)) if device.type == "cuda" else (host,)


class _Probabilities(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, query: Tensor, recipe: ProbabilitiesRecipe, *tensors: Tensor | None
    ) -> Tensor:
        ctx.recipe = recipe
        ctx.save_for_backward(*tensors)
        return attention_probabilities(scores, query, tensors[0], **recipe.given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_create_graph()
        mask, *of_call = ctx.saved_tensors
        leaves, probabilities = ctx.recipe.graph(mask, *of_call)
        _latest.drop()
        of_scores, *of_mask = torch.autograd.grad(probabilities, leaves, grads[0])
        return of_scores, None, None, of_mask[0] if of_mask else None, *[None] * len(of_call)
