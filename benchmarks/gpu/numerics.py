"""What must always hold, on a GPU: the same numbers as the original model, as the CPU, and as the graph shown."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.coverage.checks import cause, difference, evaluate, step
from benchmarks.gpu import compiled, rounding
from benchmarks.gpu.limits import below, distance
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.small import MODELS, made, tensor
from benchmarks.skipping import prepare
from benchmarks.step.subjects import SUBJECTS, Subject
from fractrain_fx import Engine, FracConfig, FracModel, RunConfig

__all__ = ["HOW", "items"]

HOW = """
Each line is a check on small models. Deterministic kernels are asked for, so that "the same" can mean bit for bit.
""".strip()

_CONFIGS = {
    "pfq": FracConfig.paper("pfq"),
    "dfq": FracConfig.paper("dfq"),
    "fractrain, auto": FracConfig.paper("fractrain", run=RunConfig(skipping="left-out")),
    "mxfp8": FracConfig(method="static", format="mx"),
}

Check = Callable[[], str]


def items(setting: Setting) -> Mapping[str, Any]:
    """One item for each check. Only running one changes settings of torch: other parts' processes list them too."""
    names = ("gpt2",) if setting.small else MODELS
    checks: dict[str, Check] = {
        "method float equals the model": partial(_of_models, names, _equals_original, setting),
        "rounding equals the CPU's, affine": partial(rounding.of_affine, setting),
        "rounding equals the CPU's, MX, NVFP4 and FP8": partial(rounding.of_blocks, setting),
        "Triton kernels give the numbers of plain operations": partial(rounding.by_kernels, setting),
        "gates by Triton kernels choose as by plain operations": partial(rounding.of_gates, setting),
        "stochastic rounding is right on average": partial(rounding.by_chance, setting),
        "what runs equals the graph shown": partial(_of_models, names, _equals_shown, setting),
        "a step and an evaluation equal the CPU's": partial(_of_models, names, _equals_cpu, setting),
        "dispatched blocks equal masked ones": partial(_dispatched, setting),
        "one compiled graph serves all precisions": partial(compiled.whole, "pfq", setting),
        "DFQ compiles whole": partial(compiled.whole, "dfq", setting),
        "CUDA graphs train like compiled code": partial(compiled.by_graphs, setting),
    }
    return {name: partial(_row, name, check) for name, check in checks.items()}


def _row(name: str, check: Check) -> Iterator[dict[str, Any]]:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first product on the GPU
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    try:
        detail, holds = check(), True
    except Exception as error:
        detail, holds = cause(error)[:300], False
    yield {"check": name, "holds": "yes" if holds else "no", "detail": detail}


def _of_models(names: Iterable[str], check: Callable[[Subject, Setting], str], setting: Setting) -> str:
    return "; ".join(f"{name}: {check(MODELS[name], setting)}" for name in names)


def _equals_original(subject: Subject, setting: Setting) -> str:
    """Outputs, gradients and buffers of a training step, and outputs of an evaluation, bit for bit."""
    model = subject.build()
    mine, theirs = made(subject, FracConfig(method="float"), setting.device, model), model.to(setting.device)
    x, _ = subject.data(4)
    args = (x.to(setting.device),)
    left, right = step(mine, args, {}, 7), step(theirs, args, {}, 7)
    for name in ("outputs", "gradients", "buffers"):
        _require_same(difference(getattr(left, name), getattr(right, name)), name)
    _require_same(difference(evaluate(mine, args, {}), evaluate(theirs, args, {})), "evaluation")
    return f"{len(left.gradients)} gradients, {len(left.buffers)} buffers"


def _require_same(differing: object, where: str) -> None:
    if differing is not None:
        raise AssertionError(f"{where} differ: {differing}")


def _equals_shown(subject: Subject, setting: Setting) -> str:
    """Outputs bit for bit; gradients up to the order of sums."""
    model, farthest = subject.build(), 0.0
    x = subject.data(4)[0].to(setting.device)
    for name in ("pfq", "dfq"):
        runs = made(subject, _CONFIGS[name], setting.device, model)
        shown = copy.deepcopy(runs)
        calls: list[tuple[FracModel, Callable[[Tensor], Any]]] = [
            (runs, runs),
            (shown, lambda x: shown.graph_module(x)[0]),  # noqa: B023
        ]
        results = []
        for twin, call in calls:
            twin.train()
            torch.manual_seed(3)
            out = tensor(call(x))
            out.square().mean().backward()
            results.append((out, {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}))
        (mine, gradients), (theirs, expected) = results
        if not torch.equal(mine, theirs):
            raise AssertionError(f"{name}: outputs differ by {float((mine - theirs).abs().max().detach()):.2g}")
        missing = expected.keys() - gradients.keys()
        if missing:
            raise AssertionError(f"{name}: no gradient for {sorted(missing)[0]}")
        farthest = max(farthest, *(distance(gradients[n], expected[n]) for n in expected))
    return f"gradients within {below(farthest, 1e-3):.1e}"


def _equals_cpu(subject: Subject, setting: Setting) -> str:
    """The loss of a training step up to values that lie between two levels; gradients finite; and an evaluation."""
    model, farthest = subject.build(), 0.0
    x, y = subject.data(4)
    for name, config in _CONFIGS.items():
        losses = []
        once = made(subject, config, "cpu", model)  # because the weights of gates are drawn
        for device in ("cpu", setting.device):
            trained = copy.deepcopy(once).to(device).train()
            engine = Engine(trained)
            loss = subject.loss(trained(x.to(device)), y.to(device))
            engine.loss(loss).backward()
            losses.append(loss.item())
            engine.end_epoch()
            bad = [n for n, p in trained.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
            if bad:
                raise AssertionError(f"{name} on {device}: no finite gradient for {bad[0]}")
            with torch.no_grad():
                evaluated = subject.loss(trained.eval()(x.to(device)), y.to(device))
            if not evaluated.isfinite():
                raise AssertionError(f"{name} on {device}: the loss of the evaluation is {float(evaluated)}")
        farthest = max(farthest, abs(losses[1] / losses[0] - 1))
    return f"losses within {below(farthest, 0.02):.1e}"


def _dispatched(setting: Setting) -> str:
    """The same loss where nobody skips, and finite gradients where half of the batch does."""
    subject = SUBJECTS["gpt2-tiny"]
    model = subject.build().to(setting.device)
    x, y = (values.to(setting.device) for values in subject.data(4))
    losses: dict[tuple[str, float], float] = {}
    for share in (0.0, 0.5):
        for form in ("masked", "gathered"):
            made = prepare(form, FracConfig.paper("dfq"), model, x, y, subject.loss, share)
            torch.manual_seed(2)
            loss = made.forward()
            loss.backward()
            losses[form, share] = loss.item()
            if not all(p.grad is not None and p.grad.isfinite().all() for p in made.parameters):
                raise AssertionError(f"{form}, {share:.0%} skipped: a parameter has no finite gradient")
    apart = abs(losses["gathered", 0.0] / losses["masked", 0.0] - 1)
    return f"losses within {below(apart, 1e-5):.1e}"
