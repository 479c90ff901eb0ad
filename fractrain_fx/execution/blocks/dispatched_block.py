"""Run a block's branch only for the samples that do not skip it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.modules.batchnorm import _BatchNorm

from fractrain_fx.execution.autocast import autocast_dtype
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.nn.quantizers import picked
from fractrain_fx.nn.ranges import RunningRange

__all__ = ["Adding", "DispatchedBlock", "Given", "rows_of", "share_of"]

Given = BatchAxis | Literal["count"] | None
"""A kind of input of a branch: a tensor with rows of each sample, a number proportional to them, or a shared value."""

Adding = Literal["new", "in place", "elsewhere"]
"""How a branch is added to the skip path: here, in new memory or in the branch's; or elsewhere, in the graph."""


class DispatchedBlock(nn.Module):
    """A branch, its skip select and the residual add behind it: gather the running samples, run, add their rows.

    In a compiled graph, and if a share below ``threshold`` skips, the branch runs for all samples, with the numbers of
    the graph shown. If all samples skip, it does not run; its parameters get zero gradients, so that optimizers and
    DistributedDataParallel see what they would see if it had run. The branch of a sample that skips is not computed, so
    the sample's choice of skipping gets no gradient (``-<upstream, branch>`` if the branch runs for all).

    Modules and parameters of the branch stay registered where the model has them; this module only refers to them.

    Args:
        region: the graph from the branch's inputs to its skip select, for any number of samples.
        given: the kind of each input.
        axis: where the samples lie in the branch's output.
        adding: how that output is added to the skip path.
        threshold: share of skipped samples (0..1) from which leaving them out pays.
    """

    threshold: Tensor

    def __init__(
        self, region: GraphModule, given: Sequence[Given], axis: BatchAxis, adding: Adding, threshold: float
    ) -> None:
        super().__init__()
        # In a tuple, which torch does not register as children: what is in it must not get a second name.
        self._region = (region,)
        self.given, self.axis, self.adding = tuple(given), axis, adding
        self.register_buffer("threshold", torch.tensor(threshold), persistent=False)
        self._types: dict[tuple[Any, ...], torch.dtype] = {}

    @property
    def region(self) -> GraphModule:
        """The graph of the branch."""
        return self._region[0]

    def forward(self, choice: Float[Tensor, "batch options"], onto: Float[Tensor, "*dims"], *given: Any) -> Tensor:
        """The block's output; if the graph does the adding, the branch's output with zeros for samples that skip.

        Args:
            choice: the block's choice.
            onto: the skip path; of the branch's shape.
            given: inputs of the branch.
        """
        running = self._running(choice, onto, given)
        if running is None:
            branch = self._branch(onto, given)
            if self.adding == "elsewhere":
                return branch
            return branch.add_(onto) if self.adding == "in place" else onto + branch
        if not len(running):
            return self._idle(choice, onto, given)
        samples = len(choice)
        branch = self._branch(onto, tuple(self._gathered(given, running, samples)))
        base = torch.zeros_like(onto, dtype=branch.dtype) if self.adding == "elsewhere" else onto
        dtype = self._type(onto.dtype, branch.dtype)
        return _added(base.to(dtype), branch.to(dtype), self.axis, running, samples)

    def _running(self, choice: Tensor, onto: Tensor, inputs: Sequence[Any]) -> Int[Tensor, " some"] | None:
        """Indices of the samples that run; ``None`` if all run, whatever they chose."""
        samples = len(choice)
        if torch.compiler.is_compiling() or choice.is_meta or not samples:
            return None
        runs = picked(choice) != 0
        running = runs.nonzero().flatten()
        skipped = 1 - len(running) / samples
        if not skipped or skipped < float(self.threshold) - 1e-6:  # the float32 buffer holds a little more than 0.1
            return None
        if not self._divides(onto, inputs, samples) or (self.training and self._syncs_batch_norm()):
            return None
        if len(running) == 1 and self.training and self._normalises():
            # One value has no variance, so a skipping sample runs along with it; that one still counts as skipped.
            running = torch.cat([running, (~runs).nonzero().flatten()[:1]])
        return running

    def _divides(self, onto: Tensor, inputs: Sequence[Any], samples: int) -> bool:
        """Whether each tensor has equally many rows of each sample; it has not if a single row stands for all."""
        rows = [x.shape[axis.axis] for x, axis in zip(inputs, self.given, strict=True) if isinstance(axis, BatchAxis)]
        return not any(count % samples for count in (*rows, onto.shape[self.axis.axis]))

    def _gathered(self, inputs: Sequence[Any], running: Tensor, samples: int) -> Iterator[Any]:
        for value, kind in zip(inputs, self.given, strict=True):
            if isinstance(kind, BatchAxis):
                yield rows_of(value, kind, running, samples)
            else:
                yield value if kind is None else share_of(value, len(running), samples)

    def _branch(self, onto: Tensor, inputs: Sequence[Any]) -> Tensor:
        branch: Tensor = self._region[0](*inputs)
        if not torch.compiler.is_compiling():
            self._types[self._kind(onto)] = branch.dtype
        return branch

    def _kind(self, onto: Tensor) -> tuple[Any, ...]:
        """The conditions on which the type of the branch's output depends."""
        return self.training, autocast_dtype(onto.device.type), onto.dtype

    def _type(self, onto: torch.dtype, branch: torch.dtype) -> torch.dtype:
        return torch.promote_types(onto, branch) if self.adding == "new" else branch

    def _idle(self, choice: Tensor, onto: Tensor, inputs: Sequence[Any]) -> Tensor:
        """The block's output if all samples skip."""
        kind = self._kind(onto)
        if kind not in self._types or any(module.training and not module.seen for module in self._ranges()):
            # The branch never ran, so its output's type is unknown, and so are its ranges, which evaluation needs.
            self._look(onto, inputs)
        dtype = self._type(onto.dtype, self._types[kind])
        tensors = [x for x in (choice, *inputs, *self._parameters_read()) if isinstance(x, Tensor) and x.requires_grad]
        floats = [x for x in tensors if x is not onto and x.is_floating_point()]
        out: Tensor = _Idle.apply(onto, dtype, self.adding != "elsewhere", *dict.fromkeys(floats))
        return out

    def _look(self, onto: Tensor, inputs: Sequence[Any]) -> None:
        """Run the branch without gradients and restore torch's generators; only ranges and running averages change."""
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # it would keep half copies of weights, without gradients
        try:
            with torch.no_grad(), torch.random.fork_rng([onto.device] if onto.is_cuda else []):
                self._branch(onto, inputs)
        finally:
            torch.set_autocast_cache_enabled(cached)

    def _modules_called(self) -> Iterator[nn.Module]:
        region = self._region[0]
        for node in region.graph.find_nodes(op="call_module"):
            yield from region.get_submodule(str(node.target)).modules()

    def _parameters_read(self) -> Iterator[nn.Parameter]:
        region = self._region[0]
        for module in self._modules_called():
            yield from module.parameters(recurse=False)
        for node in region.graph.find_nodes(op="get_attr"):
            value = attrgetter(str(node.target))(region)
            if isinstance(value, nn.Parameter):
                yield value

    def _ranges(self) -> Iterator[RunningRange]:
        return (module for module in self._modules_called() if isinstance(module, RunningRange))

    def _normalises(self) -> bool:
        functions = self._region[0].graph.find_nodes(op="call_function", target=nn.functional.batch_norm)
        return bool(functions) or any(isinstance(module, _BatchNorm) for module in self._modules_called())

    def _syncs_batch_norm(self) -> bool:
        """Whether the branch waits for other processes, some of which may not run it."""
        together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return together and any(isinstance(module, nn.SyncBatchNorm) for module in self._modules_called())


def rows_of(x: Tensor, axis: BatchAxis, running: Int[Tensor, " some"], samples: int) -> Tensor:
    """The rows of some samples, in the memory order of ``x``."""
    split, dim = _split(x, axis, samples)
    return _joined(_selected(split, dim, running), axis)


def _selected(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """``index_select`` in the memory order of ``x``; torch's own result is contiguous."""
    if x.is_contiguous():
        return x.index_select(dim, index)
    order = _order(x)
    back = sorted(range(x.ndim), key=order.__getitem__)
    return x.permute(order).index_select(order.index(dim), index).permute(back)


def _order(x: Tensor) -> list[int]:
    """The dimensions from the outermost in memory to the innermost."""
    strides = x.stride()
    return sorted(range(x.ndim), key=lambda dim: (-strides[dim], dim))


def share_of(count: int, running: int, samples: int) -> int:
    """A number proportional to the samples, for only those that run."""
    return count // samples * running


def _added(base: Tensor, rows: Tensor, axis: BatchAxis, running: Int[Tensor, " some"], samples: int) -> Tensor:
    """``base`` with the rows of some samples added."""
    split, dim = _split(base, axis, samples)
    added: Tensor = _Added.apply(split, _split(rows, axis, len(running))[0], dim, running)
    return _joined(added, axis)


def _split(x: Tensor, axis: BatchAxis, samples: int) -> tuple[Tensor, int]:
    """A view in which one dimension holds the samples alone, and the index of that dimension."""
    if not axis.folded:
        return x, axis.axis
    rows = x.shape[axis.axis] // samples
    sizes = (samples, rows) if axis.major else (rows, samples)
    return torch.unflatten(x, axis.axis, sizes), axis.axis + (not axis.major)


def _joined(x: Tensor, axis: BatchAxis) -> Tensor:
    return x.flatten(axis.axis, axis.axis + 1) if axis.folded else x


class _Added(torch.autograd.Function):
    """``index_add`` that does not save the rows; torch's own saves them for their shape."""

    @staticmethod
    def forward(ctx: Any, base: Tensor, rows: Tensor, dim: int, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.dim = dim
        if base.is_contiguous():
            return base.index_add(dim, index, rows)
        order = _order(base)  # torch adds each value by itself unless those of a row lie next to each other
        added = base.clone()
        added.permute(order).index_add_(order.index(dim), index, rows.permute(order))
        return added

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return grads[0], _selected(grads[0], ctx.dim, index) if ctx.needs_input_grad[1] else None, None, None


class _Idle(torch.autograd.Function):
    """The skip path, or zeros like it; zero gradients for the tensors that the branch would have read."""

    @staticmethod
    def forward(ctx: Any, onto: Tensor, dtype: torch.dtype, adds: bool, *read: Tensor) -> Tensor:
        ctx.adds, ctx.dtype = adds, onto.dtype
        ctx.read = [(tensor.shape, tensor.dtype, tensor.device) for tensor in read]
        return onto.to(dtype, copy=True) if adds else torch.zeros_like(onto, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.read)
        return grads[0].to(ctx.dtype) if ctx.adds else None, None, None, *zeros
