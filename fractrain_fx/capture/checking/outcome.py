"""Run a model or its graph from a fixed seed: outputs as they are, gradients and buffers as digests."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Interpreter
from torch.utils import _pytree as pytree

from fractrain_fx.capture.checking.indices import CheckedIndices
from fractrain_fx.capture.inputs.call import Example
from fractrain_fx.capture.module import RecordedModule
from fractrain_fx.capture.recording.patch import plain_paths
from fractrain_fx.capture.recording.regions import regions_left
from fractrain_fx.capture.state import Snapshot, seeded
from fractrain_fx.capture.trees import is_strided, tensors_in
from fractrain_fx.memory import return_freed_memory

__all__ = ["Digest", "Outcome", "digest", "outcome_of", "read_run", "second_output"]

# Freed bytes of gradients after which they are given back to the system. Asking for them again takes time.
_RETURNED = 2**25

# Bytes that are hashed at once, which is what a digest needs beside the tensor.
_CHUNK = 2**22

_COMPARED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Reader = Callable[[str, Tensor], None]


@dataclass(frozen=True)
class Digest:
    """A tensor's shape, its type and a SHA-256 of its values.

    Digests are equal if and only if the tensors are, value for value: NaN equals NaN, and 0 equals -0. ``largest`` is
    the largest finite magnitude of a floating tensor, else 0.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    content: bytes
    largest: float

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Outcome:
    """What one run returned, detached, and its digests by name. A run in eval mode has no digests.

    Digests are of the gradients of parameters and inputs, if the run went backward, and of the buffers after it.
    """

    output: Any
    digests: dict[str, Digest]
    buffers: frozenset[str]

    def unequal(self, other: Outcome) -> list[str]:
        """Names of gradients and buffers that another run of the model left with other values, or that it lacks."""
        mine, theirs = self.digests, other.digests
        return [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]


def outcome_of(
    snapshot: Snapshot,
    run: nn.Module | Interpreter,
    train: bool,
    example: Example,
    *,
    backward: bool = True,
    value_free: bool = False,
) -> Outcome:
    """Call the model or its graph (``run``), and in train mode go backward; see :func:`read_run`."""
    digests: dict[str, Digest] = {}

    def read(name: str, x: Tensor) -> None:
        digests[name] = digest(x)

    output = read_run(snapshot, run, train, example, read, backward=backward, value_free=value_free)
    return Outcome(output, digests, frozenset(name for name, _ in snapshot.model.named_buffers()))


def read_run(
    snapshot: Snapshot,
    run: nn.Module | Interpreter,
    train: bool,
    example: Example,
    read: Reader,
    *,
    wanted: Container[str] | None = None,
    backward: bool = True,
    value_free: bool = False,
) -> Any:
    """Call the model or its graph, and in train mode hand over each gradient, when backward has it, and each buffer.

    ``run`` is the model, its recorded graph, or an interpreter of a graph. ``read`` is called with name and gradient of
    each parameter and input that has one, then with the buffers; if ``wanted`` is given, only with these names. Without
    ``backward``, gradients are on or off as they are around this call. ``value_free`` runs the path that the model
    takes if values must not be read. The result is what the call returned, detached.
    """
    if backward:
        return_freed_memory()
    model, example = snapshot.model, example.renewed()
    # Listed before the run, because a model may put results into a dictionary among its inputs.
    inputs = list(tensors_in(example.tensors))
    with (
        snapshot.preserved(),
        seeded(),
        plain_paths(value_free=value_free),
        torch.set_grad_enabled(backward or torch.is_grad_enabled()),
    ):
        output = _call(snapshot, run, train, example)
        if train and backward:
            leaves = {**dict(model.named_parameters()), **{f"input {i}": x for i, x in enumerate(inputs)}}
            named = {name: x for name, x in leaves.items() if x.requires_grad and (wanted is None or name in wanted)}
            _gradients_one_by_one(_weighted_sum(output), named, read)
        if train:
            for name, buffer in model.named_buffers():
                if wanted is None or name in wanted:
                    read(name, buffer.detach())
    # Attached to its history, an output would keep the activations of the run.
    return pytree.tree_map_only(Tensor, Tensor.detach, output)


def second_output(snapshot: Snapshot, run: nn.Module, train: bool, example: Example) -> Any:
    """The output of the second of two calls in a row, from one seed each."""
    with snapshot.preserved(), plain_paths(), torch.enable_grad():
        for _ in range(2):
            with seeded():
                output = _call(snapshot, run, train, example.renewed())
    return pytree.tree_map_only(Tensor, Tensor.detach, output)


def _checked_indices(snapshot: Snapshot) -> AbstractContextManager[object]:
    """Refuse indices out of range inside, if a part of the model is where they would end all work of the process."""
    return CheckedIndices() if snapshot.on_gpu else nullcontext()


def _call(snapshot: Snapshot, run: nn.Module | Interpreter, train: bool, example: Example) -> Any:
    snapshot.set_mode(train)
    with _checked_indices(snapshot), regions_left():
        if isinstance(run, Interpreter):
            return run.run(*example.tensors.values())
        if isinstance(run, RecordedModule):
            run.set_mode(train)
            # Not through ``__call__``, which prints the generated code when a node fails.
            return run.forward(*example.tensors.values())
        return run(*example.args, **example.kwargs)


def _weighted_sum(output: Any) -> Tensor | None:
    """A weighted sum of all outputs that gradients flow from; ``None`` if there are none.

    The weights differ: an even sum of a softmax has no gradient.
    """
    terms = []
    for x in tensors_in(output):
        if x.requires_grad and x.is_floating_point():
            x = x.values() if x.is_nested else x if is_strided(x) else x.to_dense()
            weights = torch.arange(x.numel(), device=x.device, dtype=torch.float32).cos().to(x.dtype)
            terms.append((x.reshape(-1) * weights).sum().double())
    return torch.stack(terms).sum() if terms else None


def _gradients_one_by_one(loss: Tensor | None, leaves: dict[str, Tensor], read: Reader) -> None:
    """Compute gradients, and free each one when it was read. ``.grad`` is left alone."""
    unreturned = 0

    def reader(name: str) -> Callable[[Tensor], Tensor | None]:
        def hook(gradient: Tensor) -> Tensor | None:
            nonlocal unreturned
            unreturned += gradient.numel() * gradient.element_size()  # a sparse one has no nbytes
            if unreturned > _RETURNED:
                return_freed_memory()
                unreturned = 0
            read(name, gradient)
            # Autograd collects what a hook returns: here one zero that is seen at every position, not the gradient.
            plain = type(gradient) is Tensor and gradient.layout is torch.strided
            return gradient.new_zeros(()).expand(gradient.shape) if plain else None

        return hook

    if loss is None or not leaves:
        return
    with ExitStack() as hooks:
        for name, x in leaves.items():
            hooks.enter_context(x.register_hook(reader(name)))
        torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)


def digest(x: Tensor) -> Digest:
    """Read a tensor once, in chunks."""
    hashed, largest = hashlib.sha256(), 0.0
    for part in _chunks(x.detach()):
        if part.dtype in _COMPARED and part.numel():
            part = part + 0.0  # turns -0 into 0
            top = float(part.abs().amax())
            if not math.isfinite(top):
                part = part.masked_fill_(part.isnan(), torch.nan)  # NaN has many bit patterns
                top = float(part.abs().nan_to_num(0.0, 0.0).amax())
            largest = max(largest, top)
        hashed.update(part.contiguous().view(torch.uint8).cpu().numpy().data)
    return Digest(tuple(x.shape), x.dtype, hashed.digest(), largest)


def _chunks(x: Tensor) -> Iterator[Tensor]:
    if x.is_nested:
        for part in x.unbind():
            yield from _chunks(part)
        return
    if x.layout is not torch.strided:
        x = (x if x.layout is torch.sparse_coo else x.to_sparse_coo()).coalesce()
        yield from _chunks(x.indices())
        yield from _chunks(x.values())
        return
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x.reshape(1) if x.ndim == 0 else x
    rows = max(1, _CHUNK // max(1, x[:1].numel() * x.element_size()))
    for start in range(0, len(x), rows):
        yield x[start : start + rows].reshape(-1)
