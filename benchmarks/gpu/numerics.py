"""What must always hold, on a GPU: the same numbers as the original model, as the CPU, and as the graph shown."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import timm
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from benchmarks.coverage.checks import cause, difference, evaluate, step
from benchmarks.gpu.setting import Setting
from benchmarks.linears import rewritten as quantized_linear
from benchmarks.skipping import prepare
from benchmarks.step.subjects import SUBJECTS, Subject
from fractrain_fx import Engine, FracConfig, FracModel, Precision, fractrainify
from fractrain_fx.config import Method
from fractrain_fx.formats import ValueRange, affine, microscaling

__all__ = ["HOW", "items"]

HOW = """
Each line is a check on small models. Deterministic kernels are asked for, so that "the same" can mean bit for bit.
""".strip()

_VIT = Subject(
    "test_vit",
    lambda: timm.create_model("test_vit", num_classes=10, img_size=32),
    {"cpu": 4, "cuda": 4},
    lambda batch: (torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))),
    F.cross_entropy,
)
_MODELS = {"resnet10t": SUBJECTS["resnet10t"], "vit": _VIT, "gpt2": SUBJECTS["gpt2-tiny"]}
_CONFIGS = {
    "pfq": FracConfig(method="pfq"),
    "dfq": FracConfig(method="dfq"),
    "fractrain, auto": FracConfig(method="fractrain", execution="auto"),
    "mxfp8": FracConfig(method="static", format="mx"),
}

Check = Callable[[], str]


def items(setting: Setting) -> Mapping[str, Any]:
    """One item for each check."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first product on the GPU
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.allow_tf32 = False
    names = ("gpt2",) if setting.small else _MODELS
    checks: dict[str, Check] = {
        "method float equals the model": partial(_of_models, names, _equals_original, setting),
        "rounding equals the CPU's, affine": partial(_affine_rounding, setting),
        "rounding equals the CPU's, MX, NVFP4 and FP8": partial(_block_rounding, setting),
        "Triton kernels give the numbers of plain operations": partial(_kernels, setting),
        "stochastic rounding is right on average": partial(_stochastic_rounding, setting),
        "what runs equals the graph shown": partial(_of_models, names, _equals_shown, setting),
        "a step and an evaluation equal the CPU's": partial(_of_models, names, _equals_cpu, setting),
        "products of codes equal the simulation": partial(_codes, setting),
        "dispatched blocks equal masked ones": partial(_dispatched, setting),
        "one compiled graph serves all precisions": partial(_compiled, "pfq", setting),
        "DFQ compiles whole": partial(_compiled, "dfq", setting),
    }
    return {name: partial(_row, name, check) for name, check in checks.items()}


def _row(name: str, check: Check) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    try:
        detail, holds = check(), True
    except Exception as error:
        detail, holds = cause(error)[:300], False
    yield {"check": name, "holds": "yes" if holds else "no", "detail": detail}


def _of_models(names: Iterable[str], check: Callable[[Subject, Setting], str], setting: Setting) -> str:
    return "; ".join(f"{name}: {check(_MODELS[name], setting)}" for name in names)


def _made(subject: Subject, config: FracConfig, device: str, model: nn.Module) -> FracModel:
    x, _ = subject.data(2)
    return fractrainify(copy.deepcopy(model), config=config, example_inputs=(x,), check=False).to(device)


def _equals_original(subject: Subject, setting: Setting) -> str:
    """Outputs, gradients and buffers of a training step, and outputs of an evaluation, bit for bit."""
    model = subject.build()
    mine, theirs = _made(subject, FracConfig(method="float"), setting.device, model), model.to(setting.device)
    x, _ = subject.data(4)
    args = (x.to(setting.device),)
    left, right = step(mine, args, {}, 7), step(theirs, args, {}, 7)
    for name in ("outputs", "gradients", "buffers"):
        _require_same(difference(getattr(left, name), getattr(right, name)), name)
    _require_same(difference(evaluate(mine, args, {}), evaluate(theirs, args, {})), "evaluation")
    return f"{len(left.gradients)} gradients, {len(left.buffers)} buffers"


def _require_same(found: object, where: str) -> None:
    if found is not None:
        raise AssertionError(f"{where} differ: {found}")


def _equals_shown(subject: Subject, setting: Setting) -> str:
    """Outputs bit for bit; gradients up to the order of sums."""
    model, farthest = subject.build(), 0.0
    x = subject.data(4)[0].to(setting.device)
    for name in ("pfq", "dfq"):
        runs = _made(subject, _CONFIGS[name], setting.device, model)
        shown = copy.deepcopy(runs)
        calls: list[tuple[FracModel, Callable[[Tensor], Any]]] = [
            (runs, runs),
            (shown, lambda x: shown.graph_module(x)[0]),  # noqa: B023
        ]
        results = []
        for twin, call in calls:
            twin.train()
            torch.manual_seed(3)
            out = _tensor(call(x))
            out.square().mean().backward()
            results.append((out, {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}))
        (mine, gradients), (theirs, expected) = results
        if not torch.equal(mine, theirs):
            raise AssertionError(f"{name}: outputs differ by {float((mine - theirs).abs().max().detach()):.2g}")
        missing = expected.keys() - gradients.keys()
        if missing:
            raise AssertionError(f"{name}: no gradient for {sorted(missing)[0]}")
        farthest = max(farthest, *(_distance(gradients[n], expected[n]) for n in expected))
    return f"gradients within {_below(farthest, 1e-3):.1e}"


def _equals_cpu(subject: Subject, setting: Setting) -> str:
    """The loss of a training step up to values that lie between two levels; gradients finite; and an evaluation."""
    model, farthest = subject.build(), 0.0
    x, y = subject.data(4)
    for name, config in _CONFIGS.items():
        losses = []
        made = _made(subject, config, "cpu", model)  # once, because the weights of gates are drawn
        for device in ("cpu", setting.device):
            trained = copy.deepcopy(made).to(device).train()
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
    return f"losses within {_below(farthest, 0.02):.1e}"


def _affine_rounding(setting: Setting) -> str:
    """Share of values that go to the neighbouring level: the CPU's code may round a tie the other way."""
    x, differing, total = torch.randn(64, 4096), 0, 0
    for bits in (2, 3, 4, 6, 8):
        for dim in (None, 0):
            mine = affine.fake_quantize(x.to(setting.device), bits, dim=dim).cpu()
            error = (mine - affine.fake_quantize(x, bits, dim=dim)).abs()
            level = (x.amax() - x.amin()) / (2**bits - 1)
            _below(float(error.max() / level), 1.001)
            differing, total = differing + int((error > 1e-5).sum()), total + x.numel()
    return f"{_below(differing / total, 1e-3):.1e} of the values go to the next level"


def _block_rounding(setting: Setting) -> str:
    x = torch.randn(64, 4096) * torch.logspace(-6, 6, 64)[:, None]
    blocks: tuple[tuple[str, Any], ...] = (("e8m0", 32), ("e4m3", 16), ("float32", None), ("float32", "row"))
    for element in microscaling.ELEMENTS:
        for scale, block in blocks:
            options: dict[str, Any] = {"scale": scale, "block": block}
            mine = microscaling.fake_quantize(x.to(setting.device), element, **options).cpu()
            if not torch.equal(mine, microscaling.fake_quantize(x, element, **options)):
                raise AssertionError(f"{element} with scales {scale} for {block} differs")
    return f"{len(microscaling.ELEMENTS)} elements, {len(blocks)} kinds of scales, bit for bit"


def _kernels(setting: Setting) -> str:
    """Ranges and roundings bit for bit, and the gradient of gates up to the order of sums; both are plain on a CPU."""
    plain, quick = affine.AffineFormat(), affine.AffineFormat(triton=True)
    farthest, count = 0.0, 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for x in _layouts(dtype, setting):
            for bits in (2, 3, 8, 16, 0, 32, torch.tensor([0, 4, 8, 32], device=setting.device).view(4, 1, 1, 1)):
                within = plain.activation_range(x)
                _require_equal(quick.activation_range(x)[:2], within[:2])
                for ends in (within, ValueRange(within.lo / 2, within.span / 2)):
                    _require_equal((quick.activation(x, bits, ends),), (plain.activation(x, bits, ends),))
                for dim in (None, 0, 1) if not isinstance(bits, Tensor) else ():
                    _require_equal(quick.weight_range(x, dim=dim)[:2], plain.weight_range(x, dim=dim)[:2])
                    _require_equal((quick.weight(x, bits, dim=dim),), (plain.weight(x, bits, dim=dim),))
                count += 1
            g = torch.randn_like(x)
            for squared in (False, True):
                sums = [each.activation_gains(x, g, (0, 3, 4, 8), within, squared) for each in (quick, plain)]
                farthest = max(farthest, _distance(*sums))
    return f"{count} cases bit for bit, gradients of gates within {_below(farthest, 1e-4):.1e}"


def _layouts(dtype: torch.dtype, setting: Setting) -> Iterator[Tensor]:
    x = torch.randn(4, 24, 17, 33, device=setting.device).to(dtype)
    yield x
    yield x.contiguous(memory_format=torch.channels_last)
    yield x.transpose(1, 3)
    yield x[:, ::2]


def _require_equal(found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        if not torch.equal(mine, theirs):
            raise AssertionError(f"{int((mine != theirs).sum())} of {mine.numel()} numbers differ")


def _stochastic_rounding(setting: Setting) -> str:
    """The mean of 400,000 roundings lies within five standard errors."""
    x = torch.full((400_000,), 0.3, device=setting.device)
    rounded = affine.fake_quantize(x, 2, lo=0.0, span=3.0, stochastic=True)
    deviation = abs(float(rounded.mean()) - 0.3)
    return f"off by {_below(deviation, 5 * (0.3 * 0.7 / x.numel()) ** 0.5):.1e}"


def _codes(setting: Setting) -> str:
    """Outputs and gradients; the input's gradient is rounded to 16 bits once more."""
    layer = nn.Linear(128, 96).to(setting.device)
    farthest = 0.0
    for precision in ("3/6", "8/8", "8/16"):
        x, g = torch.randn(64, 128, device=setting.device), torch.randn(64, 96, device=setting.device)
        results: list[dict[str, Tensor]] = []
        for execution in ("simulate", "auto"):
            model = quantized_linear(copy.deepcopy(layer), x, precision, execution)
            leaf = x.clone().requires_grad_()
            torch.manual_seed(5)
            out = model(leaf)
            out.backward(g)
            if execution == "auto" and set(model.kernels().values()) != {"int8"}:
                raise AssertionError(f"{precision} ran as {model.kernels()}")
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            results.append({"out": out.detach(), "x": cast(Tensor, leaf.grad), **gradients})
        farthest = max(farthest, *(_distance(results[1][name], value) for name, value in results[0].items()))
    return f"within {_below(farthest, 1e-3):.1e}"


def _dispatched(setting: Setting) -> str:
    """The same loss where nobody skips, and finite gradients where half of the batch does."""
    subject = SUBJECTS["gpt2-tiny"]
    model = subject.build().to(setting.device)
    x, y = (each.to(setting.device) for each in subject.data(4))
    losses: dict[tuple[str, float], float] = {}
    for share in (0.0, 0.5):
        for form in ("masked", "gathered"):
            made = prepare(form, FracConfig(method="dfq"), model, x, y, subject.loss, share)
            torch.manual_seed(2)
            loss = made.forward()
            loss.backward()
            losses[form, share] = loss.item()
            if not all(p.grad is not None and p.grad.isfinite().all() for p in made.parameters):
                raise AssertionError(f"{form}, {share:.0%} skipped: a parameter has no finite gradient")
    apart = abs(losses["gathered", 0.0] / losses["masked", 0.0] - 1)
    return f"losses within {_below(apart, 1e-5):.1e}"


def _compiled(method: Method, setting: Setting) -> str:
    """No break, and no second compilation for another precision or epoch; evaluation as in eager mode."""
    subject = SUBJECTS["gpt2-tiny"]
    config = FracConfig(method=method)
    model = _made(subject, config, setting.device, subject.build()).train()
    counter = CompileCounterWithBackend("aot_eager" if setting.small else "inductor")
    compiled = cast(FracModel, torch.compile(model, fullgraph=True, backend=counter))
    engine = Engine(compiled)
    x, y = (each.to(setting.device) for each in subject.data(4))
    for precision in (Precision(3, 6), Precision(8, 8)):
        if method == "pfq":
            model.set_precision(precision)
        engine.loss(subject.loss(compiled(x), y)).backward()
        engine.end_epoch()
    if counter.frame_count != 1:
        raise AssertionError(f"{counter.frame_count} graphs were compiled")
    with torch.no_grad():
        apart = _distance(_tensor(compiled.eval()(x)), _tensor(model.eval()(x)))
    return f"evaluation within {_below(apart, 1e-2):.1e} of eager mode"


def _tensor(output: Any) -> Tensor:
    found: Tensor = output if isinstance(output, Tensor) else output.logits
    return found


def _distance(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / (y.norm() + 1e-12))


def _below(value: float, limit: float) -> float:
    if not value <= limit:
        raise AssertionError(f"{value:.3g} is above {limit:.3g}")
    return value
