"""Compiled graphs on a GPU: no second compilation, and the numbers of eager mode and of other modes of the compiler."""

from __future__ import annotations

from typing import cast

import torch
from torch._dynamo.testing import CompileCounterWithBackend

from benchmarks.gpu.limits import below, distance
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.small import made, tensor
from benchmarks.step.subjects import SUBJECTS
from fractrain_fx import Engine, FracConfig, FracModel, Precision
from fractrain_fx.config import Method

__all__ = ["by_graphs", "whole"]


def whole(method: Method, setting: Setting) -> str:
    """No break, and no second compilation for another precision or epoch; evaluation as in eager mode."""
    subject = SUBJECTS["gpt2-tiny"]
    config = FracConfig.paper(method)
    model = made(subject, config, setting.device, subject.build()).train()
    counter = CompileCounterWithBackend("aot_eager" if setting.small else "inductor")
    compiled = cast(FracModel, torch.compile(model, fullgraph=True, backend=counter))
    engine = Engine(compiled)
    x, y = (values.to(setting.device) for values in subject.data(4))
    for precision in (Precision(3, 6), Precision(8, 8)):
        if method == "pfq":
            model.set_precision(precision)
        engine.loss(subject.loss(compiled(x), y)).backward()
        engine.end_epoch()
    if counter.frame_count != 1:
        raise AssertionError(f"{counter.frame_count} graphs were compiled")
    with torch.no_grad():
        apart = distance(tensor(compiled.eval()(x)), tensor(model.eval()(x)))
    return f"evaluation within {below(apart, 1e-2):.1e} of eager mode"


def by_graphs(setting: Setting) -> str:
    """The losses of training steps over two epochs, with noise from the same seed."""
    subject = SUBJECTS["gpt2-tiny"]
    plain = subject.build()
    x, y = (values.to(setting.device) for values in subject.data(4))
    losses: dict[str, list[float]] = {"default": [], "reduce-overhead": []}
    for mode, curve in losses.items():
        torch._dynamo.reset()
        torch.manual_seed(1)
        model = made(subject, FracConfig.paper("fractrain"), setting.device, plain).train()
        compiled = cast(FracModel, torch.compile(model, fullgraph=True, mode=mode))
        engine, optimizer = Engine(compiled), torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(2):
            for _ in range(3):
                loss = subject.loss(compiled(x), y)
                engine.loss(loss).backward()
                optimizer.step()
                optimizer.zero_grad()
                curve.append(loss.item())
            engine.end_epoch()
    apart = max(abs(mine / theirs - 1) for mine, theirs in zip(*losses.values(), strict=True))
    return f"losses within {below(apart, 1e-4):.1e}"
