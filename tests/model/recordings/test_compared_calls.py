"""The first call of each kind and one of so many others are compared with the model: it finds what was not recorded."""

from __future__ import annotations

import array
import contextvars
import copy
import hashlib
import io
import itertools
import json
import logging
import math
import os
import struct
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, get_default_dtype, is_grad_enabled, nn

from fractrain_fx import FracConfig, FracModel, RunConfig, fractrainify
from fractrain_fx.capture import Recording
from fractrain_fx.capture.recording.python_reads import PythonReads
from fractrain_fx.config.config import Method
from fractrain_fx.errors import ConfigError, FracTrainWarning, InputError
from tests.build import rewritten
from tests.models import ScaledGradient, thinned

FLOAT = FracConfig(method="float", run=RunConfig(recordings=20))


class Reader(nn.Module):
    """Multiplies by a number, or calls a layer, that a function of the input gives."""

    def __init__(self, function: Callable[[Reader, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.even, self.odd = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.norm(self.first(x).transpose(1, 2)).transpose(1, 2))
        found = self._function(self, x)
        return found(y) if isinstance(found, nn.Module) else y * found


def pair(function: Callable[[Reader, Tensor], Any], config: FracConfig = FLOAT) -> tuple[Reader, FracModel]:
    torch.manual_seed(0)
    net = Reader(function)
    reference = copy.deepcopy(net)
    return reference, rewritten(net, torch.randn(2, 8, 4), config=config, check=True)


def assert_equal(reference: nn.Module, model: nn.Module, x: Tensor) -> None:
    for train in (True, False):
        reference.train(train), model.train(train)
        torch.manual_seed(1)
        expected = reference(x)
        torch.manual_seed(1)
        assert torch.equal(expected, model(x))


def as_bytes(n: int) -> int:
    file = io.BytesIO()
    file.write(bytes(n))
    return file.tell() + 1


UNSEEN: dict[str, Callable[[Reader, Tensor], Any]] = {
    "the name of an attribute": lambda net, x: getattr(net, ("even", "odd")[int(f"{x.shape[1]}") % 2]),
    "a key of text": lambda net, x: {"16": 3.0, "4": 2.0}.get(str(x.shape[1]), 1.0),
    "the text of a shape": lambda net, x: len(str(tuple(x.shape))),
    "percent": lambda net, x: len("%d" % x.shape[1]),  # noqa: UP031
    "format": lambda net, x: int(format(x.shape[1], "x"), 16),
    "a width": lambda net, x: len(f"{1:{x.shape[1]}d}"),
    "json": lambda net, x: float(json.loads(json.dumps({"n": x.shape[1]}))["n"]),
    "hex": lambda net, x: int(hex(x.shape[1]), 16),
    "bin": lambda net, x: bin(x.shape[1]).count("1"),
    "chr": lambda net, x: ord(chr(x.shape[1])),
    "Decimal": lambda net, x: float(Decimal(x.shape[1])),
    "Fraction": lambda net, x: float(Fraction(x.shape[1], 3)),
    "islice": lambda net, x: 1 + sum(1 for _ in itertools.islice(range(100), x.shape[1])),
    "a float times a size": lambda net, x: 2.0 if 0.5 * x.shape[1] > 6 else 1.0,
    "an index into a list": lambda net, x: list(range(100))[x.shape[1]],
    "an index into a text": lambda net, x: ord("abcdefghijklmnopqrstuvwxyzabcdef"[x.shape[1]]),
    "bytes": lambda net, x: as_bytes(x.shape[1]),
    "struct": lambda net, x: struct.unpack("i", struct.pack("i", x.shape[1]))[0],
    "an array": lambda net, x: array.array("i", [x.shape[1]])[0],
    "numpy": lambda net, x: float(np.asarray(x.shape[1])) + 1,
    "a hash of text": lambda net, x: 1 + hashlib.md5(repr(x.shape[1]).encode()).digest()[0] % 3,
    "a repeated text": lambda net, x: len("ab" * x.shape[1]),
    "a slice": lambda net, x: 1 + len(list(range(100))[: x.shape[1]]),
    "a file name": lambda net, x: sum(map(ord, f"table_{x.shape[1]:03d}.bin")),
}


@pytest.mark.parametrize("name", thinned(UNSEEN, 4))
def test_a_reader_that_recording_does_not_see_is_found_by_the_comparison_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards are switched off."""
    monkeypatch.setattr(PythonReads, "guards", lambda self, joined=(): ())
    reference, model = pair(UNSEEN[name])
    for length in (8, 16, 13, 4, 16):
        assert_equal(reference, model, torch.randn(3, length, 4))
    assert len(list(model._state.variants)) > 1


@pytest.mark.long
@pytest.mark.parametrize("name", UNSEEN)
def test_nothing_is_silently_different_with_all_mechanisms(name: str) -> None:
    reference, model = pair(UNSEEN[name])
    for length in (8, 16, 13, 4, 7, 16, 5, 8):
        assert_equal(reference, model, torch.randn(3, length, 4))


def test_without_comparisons_or_recordings_the_difference_stays_or_is_an_error_that_names_the_module() -> None:
    x = torch.randn(3, 16, 4)
    reference, model = pair(UNSEEN["a key of text"], FracConfig(method="float", run=RunConfig(compared_calls=0)))
    reference.eval(), model.eval()
    assert torch.allclose(model(x) * 3, reference(x))
    _, model = pair(UNSEEN["a key of text"], FracConfig(method="float", run=RunConfig(recordings=1)))
    with pytest.raises(
        InputError, match=r"output differs by .* first in the model \(Reader \(.*test_compared_calls.py"
    ):
        model(x)
    with pytest.raises(ConfigError, match="compared_calls=-1"):
        FracConfig(run=RunConfig(compared_calls=-1))


def peak(x: Tensor) -> float:
    """A value that is read where torch does not show it, as in foreign code."""
    with torch._C.DisableTorchFunction():
        return 1 + float(x.detach().max())


class Guarded(Reader):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if len(x) > 2 else 1)


@pytest.mark.parametrize("samples", [2, 3])
@pytest.mark.parametrize("kind", [Reader, Guarded])
def test_values_that_recording_does_not_see_read_are_refused_and_recorded_for_no_size(
    kind: type[Reader], samples: int
) -> None:
    model = rewritten(kind(lambda net, x: peak(x)), torch.randn(2, 8, 4), config=FLOAT, check=True).eval()
    for _ in range(3):
        with pytest.raises(InputError, match="only values"):
            model(torch.randn(samples, 8, 4))
    assert len(list(model._state.variants)) == 1


class OfTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(20, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.embedding(ids)) * peak(ids)


def test_a_recording_for_a_difference_is_compared_on_one_more_call() -> None:
    """Integers are not changed for a comparison, because few of their values make sense."""
    net = OfTokens()
    reference, model = copy.deepcopy(net), rewritten(net, torch.arange(8)[None], config=FLOAT, check=True)
    with pytest.raises(InputError, match="only values"):
        model(1 + torch.arange(8)[None])
    assert torch.equal(model(torch.arange(10)[None]), reference(torch.arange(10)[None]))
    with pytest.raises(InputError, match="only values"):
        model(torch.arange(10)[None] // 2)


def test_a_model_that_refuses_other_values_is_compared_on_its_own() -> None:
    def positive(net: Reader, x: Tensor) -> float:
        if peak(-x) > 1:
            raise ValueError("takes no negative numbers")
        return 1.0

    net = Reader(positive)
    model = rewritten(copy.deepcopy(net), torch.rand(2, 8, 4), config=FLOAT, check=True)
    assert_equal(net, model, torch.rand(3, 8, 4))


def train(model: nn.Module, lengths: tuple[int, ...]) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(5)
    for length in lengths:
        x = torch.randn(4, length, 4)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [torch.get_rng_state(), *(x.detach() for x in (*model.parameters(), *model.buffers()))]


class Three(Reader):
    def __init__(self) -> None:
        super().__init__(lambda net, x: 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.odd(self.even(super().forward(x)).relu())


@pytest.mark.parametrize("method", ["float", "static"])
def test_a_comparison_leaves_no_trace(method: Method) -> None:
    """Generators, buffers, gradients, hooks and attributes are as without comparisons, also under autocast."""
    calls: dict[int, list[str]] = {0: [], 1: []}
    ended = []
    for compared, seen in calls.items():
        torch.manual_seed(0)
        model = fractrainify(
            Three(),
            config=FracConfig(method=method, run=RunConfig(compared_calls=16 * compared, compare_every=compared)),
            example_inputs=(torch.randn(2, 8, 4),),
        )
        model.drop.register_forward_hook(lambda *_, seen=seen: seen.append("hook"))
        with torch.autocast("cpu", torch.bfloat16):
            ended.append(train(model, (8, 8, 6, 9)))
    assert calls[0] == calls[1] and len(calls[0]) == 4
    assert all(torch.equal(a, b) for a, b in zip(*ended, strict=True))


@pytest.mark.parametrize("before", [True, False])
def test_hooks_of_the_model_itself_are_in_the_graph_and_so_in_the_comparison(before: bool) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    if before:
        net.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    else:
        net.register_forward_hook(lambda module, args, output: 2 * output)
    model = fractrainify(copy.deepcopy(net), config=FLOAT, example_inputs=(torch.randn(2, 4),))
    for samples in (2, 3, 5):
        x = torch.randn(samples, 4)
        assert torch.equal(model(x), net(x))
    model.restore().register_forward_hook(lambda *_: torch.zeros(()))  # which the graph does not have
    for _ in range(8):
        assert torch.equal(model(x), net(x))


SWITCHES: list[bool] = []


class Switched(nn.Linear):
    def train(self, mode: bool = True) -> Switched:
        SWITCHES.append(mode)
        return super().train(mode)


def test_a_comparison_does_not_switch_the_mode_of_a_part() -> None:
    """A ``train`` of its own may do more than set a flag."""
    model = fractrainify(nn.Sequential(Switched(4, 4)), config=FLOAT, example_inputs=(torch.randn(2, 4),))
    model.train().get_submodule("0").eval()
    SWITCHES.clear()
    model(torch.randn(3, 4))
    assert SWITCHES == []


def test_a_comparison_leaves_checkpointing_as_it_is() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4)))
    model = fractrainify(net, config=FLOAT, example_inputs=(torch.randn(2, 8, 4),))
    model.gradient_checkpointing_enable()
    train(model, (8, 6))
    assert model.is_gradient_checkpointing


def test_comparisons_stop_with_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    _, model = pair(lambda net, x: 1.0, FracConfig(method="float", run=RunConfig(compared_calls=2, compare_every=0)))
    compared: list[int] = []
    real = Recording.difference

    def difference(self: Any, *call: Any) -> Any:
        compared.append(call[1][0].shape[1])
        return real(self, *call)

    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Recording, "difference", difference)
        for length in (8, 9, 10, 11, 12, 9):
            model(torch.randn(2, length, 4))
        with torch.no_grad():  # new in more than its size, and so compared
            model(torch.randn(2, 11, 4))
            model(torch.randn(2, 12, 4))
    assert compared == [8, 9, 10, 11]
    assert [each.message for each in caplog.records if "no longer compared" in each.message] == [
        "Reader computed what its graph computes on 2 calls of new sizes; calls of other sizes are no longer compared "
        "(run.compared_calls)"
    ]


def test_images_of_one_size_are_compared_once_for_each_mode_and_then_less_and_less_often() -> None:
    _, model = pair(lambda net, x: 1.0, FracConfig(method="float", run=RunConfig(compare_every=50)))
    compared: list[int] = []
    real = Recording.difference

    with pytest.MonkeyPatch.context() as patch:
        call = 0

        def difference(*args: Any) -> Any:
            compared.append(call)
            return real(*args)

        patch.setattr(Recording, "difference", difference)
        for call in range(1, 102):
            model.train(call % 10 < 5)(torch.randn(4, 8, 4))
    assert compared == [1, 5, 8, 16, 32, 50, 100]


SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("SCALE", default=1.0)
TABLE = torch.ones(4)


def scale() -> float:
    return 1.0


class Scales:
    def read(self) -> float:
        return 1.0


SCALES = Scales()
HERE = __name__

# What recording does not see change: a function that reads it, and a change.
CHANGES: dict[str, tuple[Callable[[Reader, Tensor], Any], Callable[[pytest.MonkeyPatch], object]]] = {
    "a context variable": (lambda net, x: SCALE.get(), lambda patch: SCALE.set(SCALE.get() + 2)),
    "the environment": (lambda net, x: float(os.environ.get("SCALE", 1)), lambda patch: patch.setenv("SCALE", "3")),
    "a function": (lambda net, x: scale(), lambda patch: patch.setattr(f"{HERE}.scale", lambda: 3.0)),
    "a method": (lambda net, x: SCALES.read(), lambda patch: patch.setattr(Scales, "read", lambda self: 3.0)),
    "a function of Python": (lambda net, x: math.floor(1.5), lambda patch: patch.setattr(math, "floor", math.ceil)),
    "the clock": (lambda net, x: 1.0 + (time.time() < 9), lambda patch: patch.setattr(time, "time", lambda: 1.0)),
    "a tensor": (lambda net, x: TABLE, lambda patch: patch.setattr(f"{HERE}.TABLE", torch.full((4,), 3.0))),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_recording_does_not_see_is_told_by_one_of_so_many_calls(
    name: str, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, change = CHANGES[name]
    _, model = pair(read, FracConfig(method="float", run=RunConfig(compare_every=4)))
    model.train(training)
    for _ in range(5):
        model(torch.randn(2, 8, 4))
    change(monkeypatch)
    model(torch.randn(2, 8, 4))
    model(torch.randn(2, 8, 4))
    with pytest.warns(FracTrainWarning, match=r"Reader now differs from its graph.* on call 8 .*output differs by"):
        model(torch.randn(2, 8, 4))


def test_no_call_but_the_first_is_compared_if_so_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = pair(lambda net, x: scale(), FracConfig(method="float", run=RunConfig(compare_every=0)))
    model(torch.randn(2, 8, 4))
    monkeypatch.setattr(f"{HERE}.scale", lambda: 3.0)
    for _ in range(600):
        model(torch.randn(2, 8, 4))
    with pytest.raises(ConfigError, match="compare_every=-1"):
        FracConfig(run=RunConfig(compare_every=-1))


def reverse(x: Tensor, share: float) -> Tensor:
    reversed_: Tensor = ScaledGradient.apply(x, -share)
    return reversed_


def cut(x: Tensor, share: float) -> Tensor:
    return torch.cat([x[:, : int(share)].detach(), x[:, int(share) :]], 1)


def hooked(x: Tensor, share: float) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * share)
    return x


class Gradients(nn.Module):
    """Changes gradients, and no output, by a share of a size that recording does not see read."""

    def __init__(self, change: Callable[[Tensor, float], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.change = nn.Linear(4, 4), nn.Linear(4, 4), change

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.change(self.first(x), 0.5 * x.shape[1]))


@pytest.mark.parametrize("change", [cut, hooked, reverse])
def test_gradients_are_compared_where_calls_decide_about_them(change: Callable[[Tensor, float], Tensor]) -> None:
    net = Gradients(change)
    reference, model = copy.deepcopy(net), rewritten(net, torch.randn(2, 8, 4), config=FLOAT, check=True)
    seen: list[Tensor] = []
    model.first.weight.register_hook(seen.append)
    for length in (8, 12, 4):
        x = torch.randn(2, length, 4)
        for each in (reference, model):
            each.zero_grad()
            each.train()(x).square().sum().backward()
        expected, actual = (each.get_parameter("first.weight").grad for each in (reference, model))
        assert expected is not None and actual is not None and torch.allclose(expected, actual, rtol=1e-4)
        assert length != 8 or len(seen) == 1  # the comparison runs no hooks


@contextmanager
def default_type() -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def switched(get: Callable[[], Any], put: Callable[[Any], None], value: Any) -> Any:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


_C = torch._C
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[], AbstractContextManager[Any]]]] = {
    "is_grad_enabled by name": (lambda: is_grad_enabled(), torch.no_grad),
    "is_grad_enabled of C": (lambda: torch._C.is_grad_enabled(), torch.no_grad),
    "inference mode of C": (lambda: torch._C.is_inference_mode_enabled(), torch.inference_mode),
    "autocast of a CPU": (lambda: torch.is_autocast_cpu_enabled(), lambda: torch.autocast("cpu", torch.bfloat16)),
    "autocast's type": (
        lambda: torch.get_autocast_dtype("cpu") == torch.float16 and torch.is_autocast_enabled("cpu"),
        lambda: torch.autocast("cpu", torch.float16),
    ),
    "default type": (lambda: torch.get_default_dtype() == torch.float64, default_type),
    "default type by name": (lambda: get_default_dtype() == torch.float64, default_type),
    "deterministic algorithms": (
        lambda: torch.are_deterministic_algorithms_enabled(),
        lambda: switched(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    ),
    "matmul precision": (
        lambda: torch.get_float32_matmul_precision() == "medium",
        lambda: switched(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    ),
    "threads": (
        lambda: torch.get_num_threads() == 3,
        lambda: switched(torch.get_num_threads, torch.set_num_threads, 3),
    ),
    "attention kernels": (
        lambda: not torch.backends.cuda.flash_sdp_enabled(),
        lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ),
    "cudnn": (
        lambda: torch.backends.cudnn.benchmark,
        lambda: switched(
            lambda: torch.backends.cudnn.benchmark,
            lambda value: setattr(torch.backends.cudnn, "benchmark", value),
            True,
        ),
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_torch_are_followed_under_whatever_name_code_asks(name: str) -> None:
    ask, within = SETTINGS[name]
    reference, model = pair(lambda net, x: 3.0 if ask() else 1.0)
    reference.eval(), model.eval()
    x = torch.randn(3, 8, 4)
    for around in (nullcontext, within, nullcontext, within):
        with around():
            assert torch.equal(reference(x), model(x))
    assert len(list(model._state.variants)) == 2


def test_the_type_of_an_inner_tensor_under_autocast_is_followed() -> None:
    reference, model = pair(lambda net, x: 3.0 if net.first(x).dtype == torch.bfloat16 else 1.0)
    reference.eval(), model.eval()
    x = torch.randn(3, 8, 4)
    for around in (nullcontext(), torch.autocast("cpu", torch.bfloat16), nullcontext()):
        with around:
            assert torch.equal(reference(x), model(x))


FACTS: dict[str, Callable[[Reader, Tensor], Any]] = {
    "is_contiguous": lambda net, x: 2.0 if x.is_contiguous() else 1.0,
    "is_contiguous of an inner tensor": lambda net, x: 2.0 if net.even(x).transpose(0, 1).is_contiguous() else 1.0,
    "stride": lambda net, x: float(x.stride(0)),
    "strides as text": lambda net, x: len(str(x.stride())),
}


@pytest.mark.parametrize("name", FACTS)
def test_layouts_are_followed(name: str) -> None:
    reference, model = pair(FACTS[name])
    base = torch.randn(4, 8, 4)
    for x in (base, base.transpose(0, 1).contiguous().transpose(0, 1), base[1:], base.clone(), base[:, :6], base[:1]):
        assert_equal(reference, model, x)


def test_a_question_whether_an_input_was_made_in_inference_mode_is_answered_or_refused() -> None:
    reference, model = pair(lambda net, x: 2.0 if x.is_inference() else 1.0)
    reference.eval(), model.eval()
    x = torch.randn(2, 8, 4)
    assert torch.equal(reference(x), model(x))
    with (
        torch.inference_mode(),
        pytest.raises(InputError, match=r"is_inference False, which .*test_compared_calls\.py"),
    ):
        model(x.clone())


@pytest.mark.long
@pytest.mark.parametrize("by_method", [False, True])
@pytest.mark.parametrize("name", ["the name of an attribute", "a key of text"])
def test_a_compiled_model_is_compared_before_its_call(name: str, by_method: bool) -> None:
    reference, model = pair(UNSEEN[name])
    reference.eval(), model.eval()
    if by_method:
        model.compile(backend="eager", fullgraph=True)
    compiled = model if by_method else torch.compile(model, backend="eager", fullgraph=True)
    for length in (8, 16, 13, 4, 7, 16):
        x = torch.randn(3, length, 4)
        assert torch.allclose(compiled(x), reference(x), atol=1e-6)
