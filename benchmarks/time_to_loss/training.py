"""Train one model with several methods side by side: same weights and batches, one step of each in every round."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.step.measure import interleaved, seconds
from benchmarks.step.subjects import next_token_loss
from benchmarks.time_to_loss.curves import Curve
from fractrain_fx import Engine, FracConfig, FracModel, Precision, RunConfig, fractrainify
from fractrain_fx.training.length import RunLength
from fractrain_fx.training.optim import make_optimizer, make_scheduler
from fractrain_fx.training.settings import TrainSettings

__all__ = ["METHODS", "Text", "Trainee", "computes_bf16", "config_of", "probe", "train"]

BF16 = "float+bf16"
METHODS = ("float", BF16, "static", "static-auto", "pfq-auto", "fractrain", "fractrain-auto")

_Clock = Callable[[Callable[[], object], str], float]


@dataclass(frozen=True)
class Text:
    """The text for all methods.

    Attributes:
        tokens, targets: batches of the training steps.
        held_out: blocks for validation, inputs and targets, in batches.
    """

    tokens: Int[Tensor, "steps batch length"]
    targets: Int[Tensor, "steps batch length"]
    held_out: list[tuple[Tensor, Tensor]]

    @classmethod
    def drawn(
        cls, train: TensorDataset, test: TensorDataset, *, steps: int, batch: int, blocks: int, seed: int
    ) -> Text:
        """Batches from passes over the training blocks in random order; validation blocks spread over the test text."""
        chance = torch.Generator().manual_seed(seed)
        passes = -(-steps * batch // len(train))
        order = torch.cat([torch.randperm(len(train), generator=chance) for _ in range(passes)])
        tokens, targets = (tensor[order[: steps * batch]].view(steps, batch, -1) for tensor in train.tensors)
        chosen = torch.linspace(0, len(test) - 1, min(blocks, len(test))).long()
        inputs, following = (tensor[chosen].split(batch) for tensor in test.tensors)
        return cls(tokens, targets, list(zip(inputs, following, strict=True)))


def config_of(method: str, fractrain: FracConfig) -> FracConfig | None:
    """The configuration of a method, from FracTrain's own; ``None`` if the model trains in float."""
    name, _, auto = method.partition("-")
    run = RunConfig(backend="codes" if auto else fractrain.run.backend)
    match name:
        case "static":
            return FracConfig(method="static", precision=Precision(8, 8), run=run)
        case "pfq":
            return FracConfig.paper("pfq", schedule="by-length", run=run)
        case "fractrain":
            return fractrain.replace(run=replace(run, skipping="left-out") if auto else run)
    return None


def computes_bf16() -> bool:
    """Whether this processor multiplies bfloat16; others convert each value, which takes many times longer."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


class Trainee:
    """A method's own copy of the model, with its optimizer and engine.

    Args:
        method: one of ``METHODS``.
        start: the model before training; it is not changed.
        text: batches of all steps.
        settings: the loop, the same for all methods.
        fractrain: FracTrain's configuration.
    """

    def __init__(
        self, method: str, start: nn.Module, text: Text, settings: TrainSettings, fractrain: FracConfig
    ) -> None:
        self.method = method
        self._text = text
        length = RunLength(settings, len(text.tokens))
        self._epoch = length.epoch_steps
        torch.manual_seed(settings.seed)  # the same gates for every execution
        began = time.perf_counter()
        self.model: nn.Module = copy.deepcopy(start)
        config = config_of(method, fractrain)
        if config is not None:
            self.model = fractrainify(self.model, config=config, example_inputs=(text.tokens[0, :2],))
        self.model.train()
        self.setup = time.perf_counter() - began
        self.engine = Engine(self.model) if isinstance(self.model, FracModel) else None
        self._optimizer = make_optimizer(self.model, settings, "language")
        self._scheduler = make_scheduler(self._optimizer, length)
        self._taken = 0

    def step(self) -> None:
        """Forward, loss, backward and optimizer on the next batch; and at the end of an epoch ``end_epoch``."""
        loss = self._loss(self._text.tokens[self._taken], self._text.targets[self._taken])
        if self.engine is not None:
            loss = self.engine.loss(loss)
        loss.backward()
        self._optimizer.step()
        self._scheduler.step()
        self._optimizer.zero_grad()
        self._taken += 1
        if self.engine is not None and self._taken % self._epoch == 0:
            self.engine.end_epoch()

    @torch.no_grad()
    def validate(self) -> float:
        """Mean cross-entropy of a held-out character, in nats."""
        self.model.eval()
        summed = sum(float(self._loss(x, y)) * y.numel() for x, y in self._text.held_out)
        self.model.train()
        return summed / sum(y.numel() for _, y in self._text.held_out)

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.method == BF16):
            return next_token_loss(self.model(x), y)


def train(
    trainees: Sequence[Trainee], *, steps: int, every: int, clock: _Clock = seconds, tell: Callable[[str], None] = print
) -> list[Curve]:
    """Train all methods to the end, in rounds of one step each in random order.

    Args:
        trainees: the methods.
        steps: steps of each method.
        every: steps between two validations, which are not timed.
        clock: times a step.
        tell: called with a line after each validation.
    """
    curves = [Curve(method.method, method.setup) for method in trainees]
    for start in range(0, steps, every):
        stop = min(start + every, steps)
        calls: Mapping[str, Callable[[], None]] = {method.method: method.step for method in trainees}
        times = interleaved(calls, stop - start, "cpu", seed=start, clock=clock)
        for trainee, curve in zip(trainees, curves, strict=True):
            curve.seconds.extend(times[trainee.method])
            curve.validation.append((stop, trainee.validate()))
        losses = ", ".join(
            f"{history.method} {history.validation[-1][1]:.3f} ({sum(history.seconds):.0f} s)" for history in curves
        )
        tell(f"step {stop}: {losses}")
    return [_with_ledger(curve, trainee) for curve, trainee in zip(curves, trainees, strict=True)]


def _with_ledger(curve: Curve, trainee: Trainee) -> Curve:
    if (engine := trainee.engine) is None:
        return curve
    if engine.steps:
        engine.end_epoch()
    return curve.replace(ledger=engine.ledger.to_dict())


def probe(method: Trainee, beside: Trainee, *, rounds: int, clock: _Clock = seconds, note: str) -> Curve:
    """A few steps of a method that is not trained to the end, each next to a step of another method."""
    calls = {trainee.method: trainee.step for trainee in (method, beside)}
    interleaved(calls, 1, "cpu")
    times = interleaved(calls, rounds, "cpu", clock=clock)
    return Curve(method.method, method.setup, times[method.method], beside=times[beside.method], note=note)
