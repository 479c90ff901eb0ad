"""Why the outputs of a file differ from those of evaluation: one product after another, and one moved code at a time.

Two libraries add float32 numbers in different orders, so a value near the middle of two levels may take one level here
and the other one there. From that rounding on, the models compute with different numbers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.export.load import session_of
from fractrain_fx import FracModel
from fractrain_fx.capture.trees import tensors_in
from fractrain_fx.export.factors import frozen_ops
from fractrain_fx.export.graph import frozen_graph
from fractrain_fx.export.onnx import _module_of
from fractrain_fx.export.rounding import FrozenRounding
from fractrain_fx.formats.affine.scale import levels_of

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Cause", "cause_in_onnx", "cause_in_transformers", "one_step", "rounded_inputs", "share"]


@dataclass(frozen=True)
class Cause:
    """A comparison at every rounding of activations.

    Attributes:
        difference: the largest of the outputs, as a share of the largest output.
        values: how many values are rounded.
        ties: how many of them get another code there, although all earlier codes are the same.
        steps: the largest difference of such a code, in steps.
        from_middle: the largest distance of such a value from the middle of two levels, in steps.
        same_codes: the difference of outputs if evaluation goes on with the codes of the other library.
        moved_here: the difference between evaluation, and evaluation after only these codes were moved.
    """

    difference: float
    values: int
    ties: int
    steps: float
    from_middle: float
    same_codes: float
    moved_here: float

    @property
    def explains(self) -> bool:
        """Whether nothing but values in the middle of two levels makes the outputs differ."""
        return self.ties > 0 and self.steps < 1.5 and self.from_middle < 1e-3 and self.same_codes < 1e-5


class _Compared(nn.Module):
    """A rounding whose codes are moved to those of another library."""

    def __init__(self, rounding: FrozenRounding, theirs: Tensor) -> None:
        super().__init__()
        self.rounding, self.theirs = rounding, theirs
        self.steps = torch.zeros(())
        self.from_middle = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """The levels of evaluation at the codes of the other library, whose own levels differ in the last bits."""
        own: Tensor = self.rounding(x)
        levels = levels_of(self.rounding.range_of(x), self.rounding.width)
        self.steps = ((self.theirs - own) / levels.scale).round()
        ties = self.steps != 0
        if ties.any():
            level = levels.places(x)[ties]
            self.from_middle = float((level - level.floor() - 0.5).abs().max())
        return own + self.steps * levels.scale


@torch.no_grad()
def _cause(run: Callable[[], Tensor], rounded: nn.Module, theirs: Mapping[str, Tensor], output: Tensor) -> Cause:
    """Compare a deployed model with the rounded values and the output of another library, by the paths of roundings."""
    ours = run()
    compared = {}
    for path, values in theirs.items():
        rounding: Any = rounded.get_submodule(path)
        compared[path] = _Compared(rounding, values)
        rounded.set_submodule(path, compared[path])
    moved = run()
    return Cause(
        difference=share(ours, output),
        values=sum(values.numel() for values in theirs.values()),
        ties=sum(int((comparison.steps != 0).sum()) for comparison in compared.values()),
        steps=max(float(comparison.steps.abs().max()) for comparison in compared.values()),
        from_middle=max(comparison.from_middle for comparison in compared.values()),
        same_codes=share(moved, output),
        moved_here=share(ours, moved),
    )


def share(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, as a share of the largest of ours."""
    return float((ours - theirs).abs().max() / ours.abs().max())


def cause_in_onnx(model: FracModel) -> Cause:
    """The cause in onnxruntime, with every rounded value an output of the file."""
    recording = model._unlabelled()
    ops, original, inputs = frozen_ops(recording.eval, None), model._state.original, tuple(recording.inputs)
    plain, written = (frozen_graph(original, recording.eval, ops, *how) for how in ((), (_module_of,)))
    roundings = {
        node.name: str(node.target)
        for node in plain.graph.find_nodes(op="call_module")
        if isinstance(plain.get_submodule(str(node.target)), FrozenRounding)
    }
    result = next(iter(written.graph.find_nodes(op="output")))
    named = {node.name: node for node in written.graph.nodes}
    result.args = ((result.args[0], *(named[name] for name in roundings)),)
    written.recompile()
    with tempfile.TemporaryDirectory() as folder:
        program: Any = torch.onnx.export(written, inputs, dynamo=True, opset_version=21, verbose=False)
        program.save(str(Path(folder) / "model.onnx"), external_data=False)
        session = session_of(Path(folder), {})
        feed = {argument.name: x.numpy() for argument, x in zip(session.get_inputs(), inputs, strict=True)}
        output, *others = [torch.from_numpy(array) for array in session.run(None, feed)]
    theirs = dict(zip(roundings.values(), others[-len(roundings) :], strict=True))
    return _cause(lambda: next(tensors_in(plain(*inputs))), plain, theirs, output)


def cause_in_transformers(model: FracModel) -> Cause:
    """The cause in transformers, with a file in the format of compressed-tensors."""
    kwargs = {name: x for name, x in model._state.recording.kwargs.items() if name != "labels"}
    with tempfile.TemporaryDirectory() as folder:
        model.export(folder, format="compressed-tensors")
        loaded: Any = type(model._state.original).from_pretrained(folder).eval()  # type: ignore[attr-defined]
    with torch.no_grad(), rounded_inputs(loaded) as theirs:
        output = loaded(**kwargs).logits
    plain: Any = model.deployed()
    return _cause(lambda: plain(**kwargs).logits, plain, theirs, output)


@contextmanager
def rounded_inputs(loaded: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The rounded inputs of layers that compressed-tensors computes inside, by their names in ``deployed()``."""
    from compressed_tensors.quantization.lifecycle import forward

    paths = {module: path for path, module in loaded.named_modules()}
    values: dict[str, Tensor] = {}
    rounds = forward.forward_quantize

    def watch(module: nn.Module, value: Tensor, name: str, settings: Any) -> Tensor:
        rounded: Tensor = rounds(module, value, name, settings)
        if name == "input":
            values[f"{paths[module]}.input_rounding"] = rounded.detach().clone()
        return rounded

    with patch.object(forward, "forward_quantize", watch):
        yield values


class _Moved(nn.Module):
    """A rounding that moves one code by one step."""

    def __init__(self, rounding: FrozenRounding, seed: int) -> None:
        super().__init__()
        self.rounding, self.seed = rounding, seed

    def forward(self, x: Tensor) -> Tensor:
        """The rounded values, of which one is the next level."""
        own: Tensor = self.rounding(x).clone()
        place = int(torch.randint(own.numel(), (), generator=torch.Generator().manual_seed(self.seed)))
        levels = levels_of(self.rounding.range_of(x), self.rounding.width)
        step = levels.scale.expand_as(own).flatten()[place]
        top = (levels.lo + levels.within.span).expand_as(own).flatten()[place]
        flat = own.view(-1)
        flat[place] += step if flat[place] + step / 2 < top else -step
        return own


@torch.no_grad()
def one_step(model: FracModel, x: Tensor, rounding: int = 3, tries: int = 10) -> list[float]:
    """How far outputs move if one code of one rounding is moved by one step, for some random codes.

    Args:
        model: that ``deployed()`` gives its original class.
        x: the input.
        rounding: its number in the order of modules.
        tries: how many codes.
    """
    plain = model.deployed()
    paths = [path for path, module in plain.named_modules() if isinstance(module, FrozenRounding)]
    own: Any = plain.get_submodule(paths[rounding])
    before, shares = plain(x), []
    for seed in range(tries):
        plain.set_submodule(paths[rounding], _Moved(own, seed))
        shares.append(share(before, plain(x)))
    return sorted(shares)
