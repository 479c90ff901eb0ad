"""Watch a training: at some steps, how much of every operand survives its rounding."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd import Variable

from fractrain_fx.capture import RecordedModule
from fractrain_fx.config import Steps
from fractrain_fx.durable import require_folder
from fractrain_fx.engine.dependence import configurations_of, input_dependence
from fractrain_fx.engine.distributed import is_first
from fractrain_fx.errors import ConfigError, FracTrainWarning
from fractrain_fx.model import rewritten_in
from fractrain_fx.numerics.blame import blame
from fractrain_fx.numerics.observe import StepObservations, observe
from fractrain_fx.numerics.records import FILE, WatchedStep, append_step, drop_cut_line, drop_steps_after
from fractrain_fx.numerics.what_if import read_what_ifs

__all__ = ["Watch", "watch"]

_EAGER = "eager"
_INSTEAD = "eager, in place of compiled code, which may differ in the last bits"
_NEVER = (
    "watch() saw no training step: it counts calls of the model in training mode with gradients. If the loop calls "
    "torch.compile of a function or of another module around the model, compile the model itself, by "
    "torch.compile(model), or leave compilation out"
)


def watch(
    model: Any,
    *,
    every: Steps | int = Steps(100),  # noqa: B008
    as_if: str | Iterable[str] = (),
    out: str | Path | None = None,
) -> Watch:
    """Watch the numbers of a training: a context manager around the loop.

    At each watched step it measures every operand of every quantized op as each product rounds it. The step computes
    what it would compute otherwise. Other steps are not slowed down and wait for nothing.

    Args:
        model: the rewritten model, perhaps inside ``torch.compile`` or ``DistributedDataParallel``.
        every: the distance of watched steps; the first step is watched. A step is a call of the model in training.
        as_if: formats (``mxfp4``, ``nvfp4``, ``mx:FW-4/BW-8``) or precisions (``FW-4/BW-8``) that the same tensors are
            rounded to for comparison.
        out: a folder, or a file ending in ``.jsonl``, for a line of JSON a watched step; by default
            :attr:`Watch.records` keeps them.

    Raises:
        InputError: ``model`` was not made by fractrainify.
        ConfigError: ``every`` is not a number of steps, or a name in ``as_if`` is unknown or fits no op.
        RunError: ``out`` cannot be written to.
    """
    return Watch(model, every=every, as_if=as_if, out=out)


class Watch:
    """Watched steps of one model. On several processes the first one watches its own samples, without waiting.

    Attributes:
        records: the watched steps so far; the newest is the last. If ``out`` takes the steps, these are the last two.
        steps: steps counted so far.
    """

    def __init__(
        self,
        model: Any,
        *,
        every: Steps | int = Steps(100),  # noqa: B008
        as_if: str | Iterable[str] = (),
        out: str | Path | None = None,
        done: int | None = None,
        told: Callable[[WatchedStep], None] | None = None,
        run: object = None,
    ) -> None:
        """See :func:`watch`; the other arguments are for trainers.

        ``done`` is the number of steps of an earlier part of the run; lines of later steps are dropped from ``out``,
        because they are trained again. ``told`` is called after watched steps, and ``records`` then has the last two.
        ``run`` is the trainer's run: a watch that another run left open, by an exception, is closed.
        """
        rewritten = rewritten_in(model, "watch")
        self._model = rewritten
        self._every = _steps(every)
        config = rewritten.frac_config
        pinned = [pin.product_recipe for pin in config.pins if pin.number_format is not None]
        self._what_ifs = read_what_ifs(as_if, [config.product_recipe, *pinned], config.affine)
        self._path = None if out is None else _file(Path(out))
        self._told = told
        self.records: list[WatchedStep] = []
        self.steps = self._begun = done or 0
        self._continues = done is not None
        self._run = None if run is None else weakref.ref(run)
        self._seen: StepObservations | None = None
        self._step = self.steps
        self._counted: bool | None = None  # whether the call that begins is watched, if that is known already
        self._ran = _EAGER
        self._choices: dict[str, Tensor] = {}
        self._eager = ExitStack()

    def __enter__(self) -> Self:
        state = self._model._state
        if isinstance(state.watcher, Watch) and state.watcher._is_left_to(self):
            state.watcher.close()
        if state.watcher is not None:
            raise ConfigError("this model is being watched already: leave one watch() out, or list all formats in one")
        if self._path is not None and is_first():
            drop_cut_line(self._path)
            if self._continues:
                drop_steps_after(self._path, self.steps)
        state.watcher = self
        return self

    def _is_left_to(self, other: Watch) -> bool:
        """Whether a trainer's run opened this watch and is over: it is gone, or ``other`` is of another one."""
        if self._run is None:
            return False
        run = self._run()
        return run is None or (other._run is not None and other._run() is not run)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if kind is None and self.steps == self._begun:
            warnings.warn(_NEVER, FracTrainWarning, stacklevel=2)

    def close(self) -> None:
        """Stop watching; what ``with`` does at its end."""
        if self._model._state.watcher is self:
            self._model._state.watcher = None
            self.finish()

    def before_compiled(self) -> None:
        """Count a step that is about to run as compiled code; a watched one runs eagerly instead."""
        self._counted = self._count()
        if self._counted:
            self.run_eagerly()

    def run_eagerly(self) -> None:
        """Make the next call run in eager mode although it was compiled."""
        self._eager.enter_context(torch.compiler.set_stance("force_eager"))
        self._ran = _INSTEAD

    def begin(self) -> bool:
        """Count a step; whether it is watched."""
        counted, self._counted = self._counted, None
        return self._count() if counted is None else counted

    def _count(self) -> bool:
        if self._seen is not None:  # a step without a backward pass
            self.finish()
        watched = self.steps % self._every == 0
        self.steps += 1
        return watched

    @contextlib.contextmanager
    def watching(self, graph_module: RecordedModule, hold: bool) -> Iterator[None]:
        """Watch the call inside, and the backward pass that follows it.

        Args:
            graph_module: the copy that runs.
            hold: stay in eager mode until the end of the backward pass, which runs parts of the model again.
        """
        try:
            with ExitStack() as observed:
                if is_first():
                    self._seen, self._step = StepObservations(self._what_ifs, self._finish_after_backward), self.steps
                    observed.enter_context(observe(graph_module, self._seen))
                yield
        finally:
            if not hold:
                self._eager.close()

    def note_choices(self, choices: Mapping[str, Tensor]) -> None:
        """Keep the choices of the gates in the step that is watched."""
        self._choices = {block: choice.detach() for block, choice in choices.items()}

    def finish(self) -> None:
        """Read what was seen of the step that is open, and keep it."""
        self._eager.close()
        observations, self._seen = self._seen, None
        ran, self._ran = self._ran, _EAGER
        if observations is None:
            return
        choices, self._choices = self._choices, {}
        step = WatchedStep(self._step, ran, observations.read(), *_choices(choices))
        if self._path is not None or self._told is not None:
            del self.records[:-1]  # describe() compares two
        self.records.append(step)
        if self._path is not None:
            append_step(self._path, step)
        if self._told is not None:
            self._told(step)

    def describe(self) -> str | None:
        """In a sentence, the op whose numbers were first not finite, or furthest out, in the last watched step."""
        self.finish()
        return blame(self.records)

    def _finish_after_backward(self) -> None:
        Variable._execution_engine.queue_callback(self.finish)


def _choices(choices: dict[str, Tensor]) -> tuple[dict[str, float], tuple[dict[str, int], float] | None]:
    """The mutual information of each block, and the commonest configuration with its share of the samples."""
    if not choices:
        return {}, None
    counts = configurations_of(choices)
    dependence = input_dependence(tuple(choices), counts)
    ((commonest, _),) = counts.most_common(1)
    return dependence.mutual_information, (dict(zip(choices, commonest, strict=True)), dependence.commonest)


def _steps(every: Steps | int) -> int:
    if isinstance(every, Steps):
        return every.number
    if isinstance(every, bool) or not isinstance(every, int):
        raise ConfigError(f"every={every!r} is not a number of steps: write Steps(100)")
    return Steps(every).number


def _file(out: Path) -> Path:
    path = out if out.suffix == ".jsonl" else out / FILE
    require_folder(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
