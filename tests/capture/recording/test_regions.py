"""Gradient regions, hooks on tensors and seeds of a model's own code are part of its graph."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import FracConfig, FracModel
from fractrain_fx.errors import CaptureError
from tests.build import rewritten as build_rewritten

FLOAT = FracConfig(method="float")


class Between(nn.Module):
    """A function between two layers, the first of which is frozen when the model is recorded."""

    scale: Tensor

    def __init__(self, function: Callable[[Between, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.generator = torch.Generator().manual_seed(3)
        self.seen: list[Tensor] = []
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        y = self._function(self, x, h)
        return self.last(h.tanh() if y is None else y) * self.scale


def pair(function: Callable[..., Any], frozen: bool) -> tuple[nn.Module, FracModel, Tensor]:
    """A model, the model rewritten (all of its parameters trained from now on), and an input."""
    torch.manual_seed(0)
    net, x = Between(function), torch.randn(3, 4)
    net.first.requires_grad_(not frozen)
    reference = copy.deepcopy(net)
    model = build_rewritten(net, x, config=FLOAT, check=True)
    for each in (reference, model):
        each.requires_grad_(True)
    return reference, model, x


def step(net: nn.Module, x: Tensor) -> list[Tensor | None]:
    """The output, and the gradients of the input and of the parameters, from one seed."""
    net.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(7)
    y = net(x)
    (y * torch.arange(y.numel()).reshape(y.shape).cos()).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in net.parameters())]


def assert_same(reference: nn.Module, model: nn.Module, x: Tensor) -> None:
    for train in (True, False, True):
        reference.train(train), model.train(train)
        for theirs, mine in zip(step(reference, x), step(model, x), strict=True):
            zero = torch.zeros(())
            assert torch.equal(
                *torch.broadcast_tensors(zero if theirs is None else theirs, zero if mine is None else mine)
            )
        assert all(torch.equal(buffer, model.get_buffer(name)) for name, buffer in reference.named_buffers())


def within(make: Callable[[], Any]) -> Callable[..., Tensor]:
    def function(self: Between, x: Tensor, h: Tensor) -> Tensor:
        with make():
            t = self.first(x).sigmoid()
        return x * t + h

    return function


def decorated(self: Between, x: Tensor, h: Tensor) -> Tensor:
    @torch.no_grad()
    def attention(v: Tensor) -> Tensor:
        return v.softmax(-1)

    return x * attention(h)


def switched_by_hand(self: Between, x: Tensor, h: Tensor) -> Tensor:
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    t = h.exp()
    torch.set_grad_enabled(before)
    return x * t


def written_in_place(self: Between, x: Tensor, h: Tensor) -> Tensor:
    y = h * 2
    with torch.no_grad():
        y.add_(1.0)
        self.scale.mul_(0.5)
    return y


def returns_its_argument(self: Between, x: Tensor, h: Tensor) -> Tensor:
    with torch.no_grad():
        same = x.contiguous()
    return same * h


def nested(self: Between, x: Tensor, h: Tensor) -> Tensor:
    with torch.no_grad():
        t = x.exp()
        with torch.enable_grad():
            u = self.first(x) * t
        w = u * 2
    return u + w


def forced(self: Between, x: Tensor, h: Tensor) -> Tensor:
    with torch.no_grad():
        z = x.detach().clone().requires_grad_()
        with torch.enable_grad():
            (g,) = torch.autograd.grad(self.first(z).square().sum(), z)
        return h.detach() * 0 + x + g


REGIONS = {
    "no_grad": within(torch.no_grad),
    "set_grad_enabled": within(lambda: torch.set_grad_enabled(False)),
    "enable_grad": within(torch.enable_grad),
    "on, off, on": nested,
    "a decorated function": decorated,
    "switched by hand": switched_by_hand,
    "writes in place": written_in_place,
    "a call that returns its argument": returns_its_argument,
    "a gradient inside": forced,
}


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("name", REGIONS)
def test_a_gradient_region_is_one_for_every_call(name: str, frozen: bool) -> None:
    """At recording, neither the input nor the first layer needs a gradient; later both do."""
    assert_same(*pair(REGIONS[name], frozen))


def test_a_region_compiles() -> None:
    _, model, x = pair(REGIONS["no_grad"], frozen=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x), model(x))


def scaled(factor: Tensor, gradient: Tensor) -> Tensor:
    return gradient * factor


def on_a_parameter(self: Between, x: Tensor, h: Tensor) -> None:
    self.last.weight.register_hook(lambda g: g * 0.5)


def removed(self: Between, x: Tensor, h: Tensor) -> None:
    h.register_hook(lambda g: g * 0).remove()


def removed_by_with(self: Between, x: Tensor, h: Tensor) -> None:
    with h.register_hook(lambda g: g * 0):
        pass


def if_needed(self: Between, x: Tensor, h: Tensor) -> None:
    if h.requires_grad:
        h.register_hook(lambda g: g * 3)


def with_a_tensor_of_the_run(self: Between, x: Tensor, h: Tensor) -> None:
    gate = h.detach().sigmoid()
    h.register_hook(lambda g: g * gate)


def with_a_size(self: Between, x: Tensor, h: Tensor) -> None:
    rows = x.shape[0]
    h.register_hook(lambda g: g / rows)


def with_tensors_in_a_list(self: Between, x: Tensor, h: Tensor) -> None:
    gates = [h.detach().sigmoid(), x.detach()]
    h.register_hook(lambda g: g * gates[0] * gates[1])


def clamps(self: Between, x: Tensor, h: Tensor) -> None:
    h.register_hook(lambda g: g.clamp(-0.01, 0.01))


def with_a_default(self: Between, x: Tensor, h: Tensor) -> None:
    def hook(gradient: Tensor, factor: Tensor = x.detach()) -> Tensor:  # noqa: B008
        return gradient * factor

    h.register_hook(hook)


def with_a_partial(self: Between, x: Tensor, h: Tensor) -> None:
    h.register_hook(functools.partial(scaled, x.detach()))


HOOKS = [
    *(clamps, with_a_tensor_of_the_run, with_tensors_in_a_list, with_a_size, with_a_default, with_a_partial),
    *(removed, removed_by_with, if_needed, on_a_parameter),
]


@pytest.mark.parametrize("function", HOOKS)
def test_a_hook_on_a_tensor_is_registered_at_every_call(function: Callable[..., None]) -> None:
    reference, model, x = pair(function, frozen=False)
    assert_same(reference, model, x)
    assert_same(reference, model, torch.randn(5, 4))


def test_a_hook_that_keeps_gradients_keeps_them() -> None:
    def keep(self: Between, x: Tensor, h: Tensor) -> None:
        h.register_hook(self.seen.append)

    reference: Any
    reference, model, x = pair(keep, frozen=False)
    reference.seen.clear(), model.seen.clear()
    step(reference, x), step(model, x)
    assert len(model.seen) == 1 and torch.equal(model.seen[0], reference.seen[0])


class Holder:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def hook(self, gradient: Tensor) -> Tensor:
        return gradient * self.tensor


def in_an_object(self: Between, x: Tensor, h: Tensor) -> None:
    h.register_hook(Holder(h.detach()).hook)


def on_grad_fn(self: Between, x: Tensor, h: Any) -> None:
    h.grad_fn.register_prehook(lambda g: g)


def on_several(self: Between, x: Tensor, h: Tensor) -> None:
    torch.autograd.graph.register_multi_grad_hook((h,), lambda g: None)


def on_saved(self: Between, x: Tensor, h: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
        return h.exp()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (in_an_object, "holds a Holder"),
        (on_grad_fn, "grad_fn.register_prehook"),
        (on_several, "several tensors"),
        (on_saved, "saved for backward"),
    ],
)
def test_a_hook_that_a_graph_cannot_register_is_refused_with_its_line(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(CaptureError, match=rf"{words}.*test_regions.py:\d+"):
        pair(function, frozen=False)


def forked(self: Between, x: Tensor, h: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        noise = torch.rand_like(x)
    return h + noise + torch.rand_like(x)


def put_back(self: Between, x: Tensor, h: Tensor) -> Tensor:
    state = torch.get_rng_state()
    noise = torch.rand_like(x)
    torch.set_rng_state(state)
    return h + noise + torch.rand_like(x)


def seeded(self: Between, x: Tensor, h: Tensor) -> Tensor:
    torch.manual_seed(0)
    return h + torch.rand_like(x)


def seeded_by_size(self: Between, x: Tensor, h: Tensor) -> Tensor:
    torch.random.manual_seed(x.shape[0])
    return h + torch.rand_like(x)


def own_generator(self: Between, x: Tensor, h: Tensor) -> Tensor:
    return h + torch.rand(x.shape, generator=self.generator)


@pytest.mark.parametrize("function", [forked, put_back, seeded, seeded_by_size, own_generator])
def test_seeds_of_forward_are_part_of_the_graph(function: Callable[..., Tensor]) -> None:
    reference, model, x = pair(function, frozen=False)
    for each in (x, torch.randn(5, 4)):
        assert_same(reference, model, each)
        torch.manual_seed(11)
        reference(each)
        after = torch.get_rng_state()
        torch.manual_seed(11)
        model(each)
        assert torch.equal(after, torch.get_rng_state())


def _draw(make: Callable[[Between], Any]) -> Callable[..., Tensor]:
    return lambda self, x, h: h + torch.rand(x.shape, generator=make(self))


REFUSED_SEEDS = {
    "a generator made in forward": _draw(lambda self: torch.Generator().manual_seed(2)),
    "its own generator": _draw(lambda self: self.generator.manual_seed(1)),
    "torch's generator by its method": lambda self, x, h: (torch.default_generator.manual_seed(4), torch.rand_like(h))[
        1
    ],
    "by chance": lambda self, x, h: (torch.seed(), h)[1],
    "Python": lambda self, x, h: (random.seed(4), h * random.random())[1],
    "numpy": lambda self, x, h: (np.random.seed(4), h * float(np.random.rand()))[1],
}


@pytest.mark.parametrize("name", REFUSED_SEEDS)
def test_seeds_that_a_graph_cannot_set_are_refused_with_their_line(name: str) -> None:
    with pytest.raises(CaptureError, match=r"(seeds|sets|makes) .*test_regions.py:\d+"):
        pair(REFUSED_SEEDS[name], frozen=False)
