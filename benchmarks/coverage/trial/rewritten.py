"""Checks of the FracTrain rewrite: its table, its state, a training step, and its copies."""

from __future__ import annotations

import copy
import tempfile
from collections import Counter
from pathlib import Path

import torch
from torch import nn

from benchmarks.coverage.checks import Step, difference, evaluate, objective, one_line
from benchmarks.coverage.trial.state import FailedError, Trial
from fractrain_fx import Engine, FracModel, summarize
from fractrain_fx.capture.state import Snapshot, seeded

__all__ = [
    *("checkpoint", "deepcopy", "evaluation", "gates", "restore", "rewrite"),
    *("save_and_load", "state_dict", "table", "training_step"),
]


def rewrite(trial: Trial) -> None:
    """``method="fractrain"`` rewrites the model. The time covers recording, checks and rewrite."""
    trial.before = trial.after = Step([], {}, {})  # frees memory: both were compared, each as large as the model
    with seeded():
        trial.rewritten = trial.timed("rewrite", lambda: trial.rewrite(trial.recording, "fractrain"))
    trial.row["seconds"]["rewrite"] = round(sum(trial.row["seconds"][name] for name in ("checked", "rewrite")), 3)
    summary = summarize(trial.rewritten)
    trial.row["contractions"] = len(summary.ops)
    trial.row["macs"] = summary.macs
    trial.row["blocks"] = dict(Counter(str(block.skip).lower() for block in summary.blocks))
    modes = ("gated", "scheduled", "pinned", "float")
    trial.row["shares"] = {mode: round(summary.share(mode), 4) for mode in modes}
    trial.row["uncounted"] = dict(Counter(op.kind for op in summary.uncounted))


def table(trial: Trial) -> None:
    """Every contraction has a reason for its precision, and either a cost or the mark "uncounted"."""
    for op in trial.rewritten.ops:
        if not op.precision.reason or (op.macs is None) != (op.precision.mode == "uncounted"):
            raise FailedError(f"op {op.name!r} has no reason, or no cost and is not called uncounted")


def state_dict(trial: Trial) -> None:
    """All keys of the original hold the same tensors, and every other key starts with ``frac.``."""
    theirs, mine = trial.model.state_dict(keep_vars=True), trial.rewritten.state_dict(keep_vars=True)
    missing = theirs.keys() - mine.keys()
    foreign = [key for key in mine.keys() - theirs.keys() if not key.startswith("frac.")]
    if missing or foreign:
        raise FailedError(f"missing {sorted(missing)[:3]}, inserted outside frac.: {sorted(foreign)[:3]}")
    moved = [key for key in theirs if theirs[key] is not mine[key]]
    if moved:
        raise FailedError(f"{moved[:3]} are other tensors than the model's own")


def checkpoint(trial: Trial) -> None:
    """A checkpoint of the original loads without a key mapping."""
    state = {key: value.detach().clone() for key, value in trial.model.state_dict().items()}
    other = {key: value * 0.5 if value.is_floating_point() else value.clone() for key, value in state.items()}
    trial.rewritten.load_state_dict(other)
    words = difference(other, dict(trial.model.state_dict()), "weights")
    trial.rewritten.load_state_dict(state)
    if words:
        raise FailedError(words)


def restore(trial: Trial) -> None:
    """``restore()`` gives back the class, the names and the weights."""
    back = trial.rewritten.restore()
    if type(back) is not type(trial.ready.model):
        raise FailedError(f"restore() gives a {type(back).__name__}")
    names = [name for name, _ in back.named_parameters()]
    if any(name.startswith("frac.") for name in names) or hasattr(back, "frac"):
        raise FailedError("restore() gives a model that still holds what was inserted")


def training_step(trial: Trial) -> None:
    """One step gives a finite gradient to each parameter that had one in the original, and updates the weights."""
    model = trial.rewritten
    engine = Engine(model)
    model.train()
    model.zero_grad(set_to_none=True)
    with seeded(7):
        engine.loss(objective(model(*trial.ready.args, **trial.ready.kwargs))).backward()
    trial.found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    missing = sorted(trial.had - trial.found.keys())
    if missing:
        raise FailedError(f"no gradient any more: {len(missing)} parameters, first {missing[0]}")
    wrong = sorted(name for name in trial.had if not bool(trial.found[name].isfinite().all()))
    if wrong:
        raise FailedError(f"infinite or NaN gradient: {len(wrong)} parameters, first {wrong[0]}")
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.SGD(model.parameters(), lr=1e-3).step()


def gates(trial: Trial) -> None:
    """Every gate and the controller get a finite gradient."""
    names = {name for name, _ in trial.rewritten.named_parameters() if name.startswith("frac.")}
    wrong = [n for n in sorted(names) if n not in trial.found or not bool(trial.found[n].isfinite().all())]
    if not names or wrong:
        raise FailedError(f"without a finite gradient: {wrong[:3] or 'there is no gate'}")


def evaluation(trial: Trial) -> None:
    """The rewritten model evaluates after a training step."""
    trial.found = {}
    trial.rewritten.zero_grad(set_to_none=True)
    with Snapshot(trial.model).preserved():
        trial.expected = evaluate(trial.rewritten, trial.ready.args, trial.ready.kwargs)


def deepcopy(trial: Trial) -> None:
    """A deep copy shares no parameters and computes the same. It is skipped if the original cannot be copied either."""
    try:
        twin = copy.deepcopy(trial.rewritten)
    except Exception:
        try:
            copy.deepcopy(trial.model)
        except Exception as error:  # the old weight norm keeps a computed tensor, which cannot be copied
            trial.row["notes"].append(f"the model itself cannot be copied after a step: {one_line(error)[:100]}")
            return
        raise
    if {p.data_ptr() for p in twin.parameters() if p.numel()} & {p.data_ptr() for p in trial.rewritten.parameters()}:
        raise FailedError("the copy shares parameters with the model")
    _require_expected(trial, twin)


def save_and_load(trial: Trial) -> None:
    """``from_pretrained`` rebuilds on a fresh model what ``save_pretrained`` wrote."""
    with tempfile.TemporaryDirectory() as directory:
        trial.rewritten.save_pretrained(Path(directory))
        with seeded():
            fresh = trial.ready.rebuild()
        _require_expected(trial, FracModel.from_pretrained(Path(directory), model=fresh))


def _require_expected(trial: Trial, model: nn.Module) -> None:
    words = difference(trial.expected, evaluate(model, trial.ready.args, trial.ready.kwargs), "outputs")
    if words:
        raise FailedError(words)
