"""Put one model through every check, and write down what was found."""

from __future__ import annotations

import copy
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.coverage.cases import NotBuiltError, Ready
from benchmarks.coverage.checks import Step, cause, difference, evaluate, objective, one_line, step, train_outputs
from benchmarks.coverage.resized import DIFFERENT, ERROR, REFUSED, Pair, worst
from benchmarks.coverage.sizes import variants
from fractrain_fx import Engine, FracConfig, FracModel, summarize
from fractrain_fx.capture import Recording, record, resize_batch
from fractrain_fx.capture.checking.check import Batching
from fractrain_fx.capture.inputs.batch import batch_size
from fractrain_fx.capture.inputs.call import describe_call
from fractrain_fx.capture.recording.patch import plain_paths
from fractrain_fx.capture.state import Snapshot, seeded
from fractrain_fx.config import Method
from fractrain_fx.errors import FracTrainError
from fractrain_fx.rewriting import rewrite

__all__ = ["CHECKS", "Row", "examine", "passed"]

Row = dict[str, Any]

# Relative, and far above what the order of a sum changes.
_ROUNDING = 1e-4


class _FailedError(Exception):
    """A check found something wrong."""


class _DifferentError(_FailedError):
    """The rewritten model computes something else than the model, and says nothing."""


class _Trial:
    """One model on its way through the checks."""

    def __init__(self, build: Callable[[], Ready]) -> None:
        self._build = build
        self.row: Row = {"checks": {}, "seconds": {}, "notes": []}

    ready: Ready
    before: Step
    after: Step
    had: set[str]
    asked: dict[str, Any]
    snapshot: Snapshot
    recording: Recording
    plain: FracModel
    rewritten: FracModel
    found: dict[str, torch.Tensor]
    expected: list[torch.Tensor]

    @property
    def model(self) -> nn.Module:
        return self.ready.model

    def _timed(self, name: str, work: Callable[[], Any]) -> Any:
        """Processor time: of one thread, and so nearly that of a quiet machine on a busy one."""
        start = time.process_time()
        result = work()
        self.row["seconds"][name] = round(time.process_time() - start, 3)
        return result

    def _rewrite(self, recording: Recording, method: Method) -> FracModel:
        config = FracConfig(method=method)
        return FracModel(rewrite(self.model, recording, config))

    def build(self) -> None:
        """The model is made, without a download."""
        with seeded():
            self.ready = self._timed("build", self._build)
        # What the recording stands for: a call without caches, which are for generating text.
        self.asked = describe_call(self.model, self.ready.args, self.ready.kwargs).kwargs
        self.row["how"] = self.ready.how
        self.row["parameters"] = sum(p.numel() for p in self.model.parameters())

    def forward(self) -> None:
        """The model itself trains on its inputs: gradients and a finite loss."""
        with Snapshot(self.model).kept():
            self.before = self._timed("step", lambda: step(self.model, self.ready.args, self.asked, 7))
        self.model.zero_grad(set_to_none=True)
        self.had = {name for name, g in self.before.gradients.items() if bool(g.isfinite().all())}
        if not self.before.gradients:
            raise _FailedError("no parameter of the model itself gets a gradient")
        if not self.had:
            raise _FailedError("every gradient of the model itself is infinite or NaN")

    def capture(self) -> None:
        """The model is recorded, and the recording agrees with it; the time is that of recording both modes alone."""
        inputs = self.ready.args, self.ready.kwargs
        self.recording = self._timed("checked", lambda: record(self.model, *inputs))
        self._timed("capture", lambda: record(self.model, *inputs, check=False))
        self.snapshot = Snapshot(self.model)  # with the tables that recording made it fill
        recording = self.recording
        self.row["nodes"] = len(recording.train.graph.nodes)
        self.row["graphs"] = 1 if recording.eval is recording.train else 2
        self.row["fixed_batch"] = recording.fixed_batch
        self.row["leaves"] = _leaves(recording)
        if not recording.checked:
            raise _FailedError("the recording was not compared with the model")

    def _second(self) -> Recording:
        """The recording once more, on the model's own modules and tensors: what ``record`` would give again."""
        model = self.model
        memo = {id(each): each for each in (*model.modules(), *model.parameters(), *model.buffers())}
        train = copy.deepcopy(self.recording.train, memo)
        return replace(self.recording, train=train, eval=copy.deepcopy(self.recording.eval, memo))

    def float_rewrite(self) -> None:
        """``method="float"`` rewrites it."""
        self.plain = self._rewrite(self._second(), "float")

    def train_outputs(self) -> None:
        """Training outputs from the same seed are equal bit for bit."""
        with self.snapshot.kept():
            self.after = step(self.plain, self.ready.args, self.ready.kwargs, 7)
        self._require_same("outputs", self.before.outputs, self.after.outputs)

    def gradients(self) -> None:
        """Gradients are equal bit for bit."""
        self._require_same("gradients", self.before.gradients, self.after.gradients)

    def buffers(self) -> None:
        """Buffers after the step are equal bit for bit."""
        self._require_same("buffers", self.before.buffers, self.after.buffers)

    def _require_same(self, what: str, theirs: Any, mine: Any) -> None:
        words = difference(theirs, mine, what)
        if words is None:
            return
        # A model that is told not to look at values may take another path to the same result: capture follows that one
        # and has compared it with the usual one up to rounding. See fractrain_fx/capture/checking/check.py.
        with self.snapshot.kept(), plain_paths(value_free=True):
            other = step(self.model, self.ready.args, self.asked, 7)
        if difference(getattr(other, what), mine, what) is None:
            self.row["notes"].append(f"{what} equal those of the model's path that reads no values")
            return
        with self.snapshot.kept():
            again = step(self.model, self.ready.args, self.asked, 7)
        if difference(theirs, getattr(again, what), what) is not None:
            words += "; the model itself differs between two runs of one seed"
        elif self._is_rounding(what, theirs, mine):
            self.row["notes"].append(f"{what} are equal up to rounding, as they are between two runs of the rewrite")
            return
        raise _DifferentError(words)

    def _is_rounding(self, what: str, theirs: Any, mine: Any) -> bool:
        """Whether the rewrite differs between two runs itself, as sums do by where in memory their terms lie."""
        with self.snapshot.kept():
            again = step(self.plain, self.ready.args, self.ready.kwargs, 7)
        differs = difference(mine, getattr(again, what), what) is not None
        return differs and difference(theirs, mine, what, tolerance=_ROUNDING) is None

    def eval_outputs(self) -> None:
        """Evaluation at another batch size is equal bit for bit."""
        batches = [{"args": self.ready.args, "kwargs": kwargs} for kwargs in (self.asked, self.ready.kwargs)]
        if not self.recording.fixed_batch:
            packed = self.recording.batching is Batching.PACKED
            larger = (batch_size(batches, packed=packed) or 0) + 1
            batches = [resize_batch(batch, larger, packed=packed) for batch in batches]
        asked, given = batches
        with self.snapshot.kept():
            theirs = evaluate(self.model, **asked)
        with self.snapshot.kept():
            mine = evaluate(self.plain, **given)
        words = difference(theirs, mine, "outputs")
        if words is None:
            return
        with self.snapshot.kept(), plain_paths(value_free=True):
            other = evaluate(self.model, **asked)
        if difference(other, mine, "outputs") is not None:
            raise _DifferentError(words)
        self.row["notes"].append("evaluation equals the model's path that reads no values")

    def rewrite(self) -> None:
        """``method="fractrain"`` rewrites it; the time is that of ``fractrainify``, which records and checks first."""
        self.before = self.after = Step([], {}, {})  # compared already, and each as large as the model
        with seeded():
            self.rewritten = self._timed("rewrite", lambda: self._rewrite(self.recording, "fractrain"))
        self.row["seconds"]["rewrite"] = round(sum(self.row["seconds"][name] for name in ("checked", "rewrite")), 3)
        summary = summarize(self.rewritten)
        self.row["contractions"] = len(summary.ops)
        self.row["macs"] = summary.macs
        self.row["blocks"] = dict(Counter(str(block.skip).lower() for block in summary.blocks))
        modes = ("gated", "scheduled", "pinned", "float")
        self.row["shares"] = {mode: round(summary.share(mode), 4) for mode in modes}
        self.row["uncounted"] = dict(Counter(op.kind for op in summary.uncounted))

    def table(self) -> None:
        """Every contraction has a reason, and a cost or the word that it has none."""
        for op in self.rewritten.ops:
            if not op.precision.reason or (op.macs is None) != (op.precision.mode == "uncounted"):
                raise _FailedError(f"op {op.name!r} has no reason, or no cost and is not called uncounted")

    def state_dict(self) -> None:
        """All keys are there unchanged, ties included, and the rest lies under ``frac.``."""
        theirs, mine = self.model.state_dict(keep_vars=True), self.rewritten.state_dict(keep_vars=True)
        missing = theirs.keys() - mine.keys()
        foreign = [key for key in mine.keys() - theirs.keys() if not key.startswith("frac.")]
        if missing or foreign:
            raise _FailedError(f"missing {sorted(missing)[:3]}, inserted outside frac.: {sorted(foreign)[:3]}")
        moved = [key for key in theirs if theirs[key] is not mine[key]]
        if moved:
            raise _FailedError(f"{moved[:3]} are other tensors than the model's own")

    def checkpoint(self) -> None:
        """A checkpoint of the original loads as it is."""
        state = {key: value.detach().clone() for key, value in self.model.state_dict().items()}
        other = {key: value * 0.5 if value.is_floating_point() else value.clone() for key, value in state.items()}
        self.rewritten.load_state_dict(other)
        words = difference(other, dict(self.model.state_dict()), "weights")
        self.rewritten.load_state_dict(state)
        if words:
            raise _FailedError(words)

    def restore(self) -> None:
        """``restore()`` gives back the class, the names and the weights."""
        back = self.rewritten.restore()
        if type(back) is not type(self.ready.model):
            raise _FailedError(f"restore() gives a {type(back).__name__}")
        names = [name for name, _ in back.named_parameters()]
        if any(name.startswith("frac.") for name in names) or hasattr(back, "frac"):
            raise _FailedError("restore() gives a model that still holds what was inserted")

    def training_step(self) -> None:
        """One step gives a finite gradient to each parameter that had one, and is taken."""
        model = self.rewritten
        engine = Engine(model)
        model.train()
        model.zero_grad(set_to_none=True)
        with seeded(7):
            engine.loss(objective(model(*self.ready.args, **self.ready.kwargs))).backward()
        self.found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        missing = sorted(self.had - self.found.keys())
        if missing:
            raise _FailedError(f"no gradient any more: {len(missing)} parameters, first {missing[0]}")
        wrong = sorted(name for name in self.had if not bool(self.found[name].isfinite().all()))
        if wrong:
            raise _FailedError(f"infinite or NaN gradient: {len(wrong)} parameters, first {wrong[0]}")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.optim.SGD(model.parameters(), lr=1e-3).step()

    def gates(self) -> None:
        """Every gate and the controller get a finite gradient."""
        names = {name for name, _ in self.rewritten.named_parameters() if name.startswith("frac.")}
        wrong = [n for n in sorted(names) if n not in self.found or not bool(self.found[n].isfinite().all())]
        if not names or wrong:
            raise _FailedError(f"without a finite gradient: {wrong[:3] or 'there is no gate'}")

    def evaluation(self) -> None:
        """After a step the rewritten model evaluates."""
        self.found = {}
        self.rewritten.zero_grad(set_to_none=True)
        with Snapshot(self.model).kept():
            self.expected = evaluate(self.rewritten, self.ready.args, self.ready.kwargs)

    def deepcopy(self) -> None:
        """A deep copy shares nothing and computes the same, where the model can be copied after a step at all."""
        try:
            twin = copy.deepcopy(self.rewritten)
        except Exception:
            try:
                copy.deepcopy(self.model)
            except Exception as error:  # old forms of weight norm keep a computed tensor
                self.row["notes"].append(f"the model itself cannot be copied after a step: {one_line(error)[:100]}")
                return
            raise
        if {p.data_ptr() for p in twin.parameters() if p.numel()} & {p.data_ptr() for p in self.rewritten.parameters()}:
            raise _FailedError("the copy shares parameters with the model")
        self._require_expected(twin)

    def save_and_load(self) -> None:
        """What ``save_pretrained`` writes, ``from_pretrained`` (by ``fractrainify``) rebuilds on a fresh model."""
        with tempfile.TemporaryDirectory() as directory:
            self.rewritten.save_pretrained(Path(directory))
            with seeded():
                fresh = self.ready.rebuild()
            self._require_expected(FracModel.from_pretrained(Path(directory), model=fresh))

    def _require_expected(self, model: nn.Module) -> None:
        words = difference(self.expected, evaluate(model, self.ready.args, self.ready.kwargs), "outputs")
        if words:
            raise _FailedError(words)

    def sizes(self) -> None:
        """At other batch, sequence and image sizes it equals the model, or refuses with an error that says why.

        Sizes that the model itself refuses count for nothing.
        """
        found: dict[str, str] = self.row.setdefault("sizes", {})
        words: dict[str, str] = self.row.setdefault("size_words", {})
        packed = self.recording.batching is Batching.PACKED
        pair = Pair(self.model, self.plain, self.snapshot, frozenset(self.ready.kwargs))
        for variant in variants(self.ready.args, self.asked, packed=packed):
            found[variant.label], why = worst(pair.at(variant, run) for run in (evaluate, train_outputs))
            words.update({variant.label: why[:300]} if why else {})
        failed = [label for label, outcome in found.items() if outcome in (ERROR, DIFFERENT)]
        if failed:
            kind = _DifferentError if DIFFERENT in found.values() else _FailedError
            raise kind("; ".join(f"{label}: {found[label]}: {words[label]}" for label in failed))


# Each check with those it needs: it is not reached where one of them failed.
_ORDER: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("build", ()),
    ("forward", ("build",)),
    ("capture", ("forward",)),
    ("float_rewrite", ("capture",)),
    ("train_outputs", ("float_rewrite",)),
    ("gradients", ("train_outputs",)),
    ("buffers", ("train_outputs",)),
    ("eval_outputs", ("float_rewrite",)),
    ("rewrite", ("capture",)),
    ("table", ("rewrite",)),
    ("state_dict", ("rewrite",)),
    ("checkpoint", ("rewrite",)),
    ("restore", ("rewrite",)),
    ("training_step", ("rewrite",)),
    ("gates", ("training_step",)),
    ("evaluation", ("training_step",)),
    ("deepcopy", ("evaluation",)),
    ("save_and_load", ("evaluation",)),
    ("sizes", ("float_rewrite",)),  # the last one, as it takes the longest
)
CHECKS = tuple(name for name, _ in _ORDER)


def examine(build: Callable[[], Ready], report: Callable[[Row], None] = lambda row: None) -> Row:
    """Run all checks on one model.

    Args:
        build: makes it.
        report: is shown the row before each check, with that check as ``at``: what is known if the process dies there.
    """
    warnings.simplefilter("ignore")
    # Torch's own attention modules in evaluation as they compute in training: fused, they differ in the last bits.
    torch.backends.mha.set_fastpath_enabled(False)
    trial = _Trial(build)
    row = trial.row
    checks: dict[str, str] = row["checks"]
    for name, needs in _ORDER:
        if any(checks[each] != "passed" for each in needs):
            checks[name] = "not reached"
            continue
        row["at"] = name
        report(row)
        try:
            getattr(trial, name)()
            checks[name] = "passed"
        except Exception as error:  # whatever goes wrong with a model is what is being measured
            checks[name] = "failed"
            row.setdefault("failed_at", name)
            told = isinstance(error, _FailedError | NotBuiltError)
            words = row.setdefault("causes", {})[name] = one_line(error) if told else cause(error)
            row.setdefault("cause", words)
            row.setdefault("verdict", _verdict(name, error))
            row["not_built"] = isinstance(error, NotBuiltError)
    row.pop("at", None)
    return row


def passed(row: Row) -> bool:
    """Whether every single check was made and held; rows from before there was one at other sizes lack that."""
    checks = {"sizes": "passed"} | row["checks"]
    return all(checks.get(name) == "passed" for name in CHECKS)


def _verdict(check: str, error: BaseException) -> str:
    """Whether the toolkit refuses the model with an error of its own, is silently wrong about it, or neither."""
    if isinstance(error, _DifferentError):
        return DIFFERENT
    if isinstance(error, FracTrainError) and check in ("capture", "float_rewrite", "rewrite"):
        return REFUSED
    return "failed" if isinstance(error, _FailedError | NotBuiltError) else ERROR


def _leaves(recording: Recording) -> list[dict[str, Any]]:
    """Modules kept as one node, by reason: how many, the first one, and their share of the matrices' elements."""
    whole = sum(p.numel() for p in recording.train.parameters() if p.ndim >= 2) or 1
    rows: dict[str, dict[str, Any]] = {}
    for path, reason in recording.leaves.items():
        row = rows.setdefault(reason[:300], {"reason": reason[:300], "count": 0, "first": path, "share": 0.0})
        row["count"] += 1
        inside = sum(p.numel() for p in recording.train.get_submodule(path).parameters() if p.ndim >= 2)
        row["share"] = round(row["share"] + inside / whole, 4)
    return list(rows.values())
