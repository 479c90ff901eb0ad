"""Calls of torch that give Python a value of a tensor, or that give nothing."""

from __future__ import annotations

import copy
import re
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import get_testing_overrides, resolve_name

from fractrain_fx import FracConfig
from fractrain_fx.capture import record
from fractrain_fx.errors import CaptureError, InputError
from tests.build import rewritten


class Net(nn.Module):
    """Two layers; ``read`` gets their result and gives a factor or None."""

    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.read = read

    def forward(self, x: Tensor) -> Any:
        y = self.first(x)
        value = self.read(y)
        return self.last(y) if value is None else self.last(y) * value


READS: list[Callable[[Tensor], Any]] = [
    lambda y: float(f"{y.max():.3f}"),
    lambda y: len(str(y)),
    lambda y: np.from_dlpack(y.detach())[0, 0].item(),
    lambda y: y.untyped_storage()[0],
    lambda y: y.relu().to_sparse()._nnz(),
    lambda y: torch.quantize_per_tensor_dynamic(y, torch.quint8, False).q_scale(),
    lambda y: torch.ops.aten._local_scalar_dense(y[0, 0]),
    lambda y: 1 + torch.equal(input=y, other=y.relu()),
    lambda y: 1 + torch.allclose(input=y, other=y.relu()),
    lambda y: len(str(y.long().tolist())),
    lambda y: len([0] + y[0].long().tolist()),  # noqa: RUF005 (as models write it),
    lambda y: np.asarray(y[0].long().tolist()).sum().item(),
]


@pytest.mark.parametrize("read", READS)
def test_a_read_of_values_that_is_used_is_refused_with_its_line(read: Callable[[Tensor], Any]) -> None:
    line = read.__code__.co_firstlineno
    with pytest.raises(CaptureError, match=rf"{re.escape(Path(__file__).name)}:{line}\b"):
        record(Net(read), (torch.randn(3, 4),))


class ScaledByText(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * float(f"{self.layer.weight.abs().max():.3f}")


def test_the_text_of_a_weight_is_refused_and_in_a_part_keeps_it_whole() -> None:
    with pytest.raises(CaptureError, match="__format__"):
        record(ScaledByText(), (torch.randn(3, 4),))
    recording = record(nn.Sequential(nn.Linear(4, 4), ScaledByText()), (torch.randn(3, 4),))
    assert list(recording.leaves) == ["1"]


def test_text_for_a_log_is_no_part_of_the_graph() -> None:
    def logs(y: Tensor) -> None:
        print(f"largest {y.max():.3f}", y, y.argmax(1).tolist())

    recording = record(Net(logs), (torch.randn(3, 4),))
    assert any("print or a log" in note for note in recording.python.notes)
    assert not any("__" in node.name for node in recording.train.graph.nodes)


def _values(read: Callable[..., Any], args: tuple[Any, ...]) -> str | None:
    """What a function shows of its arguments, as text; ``None`` if it refuses them or gives tensors."""
    try:
        found = read(*args)
    except Exception:
        return None
    parts = found if isinstance(found, (tuple, list)) else [found]
    return None if any(x is None or x is NotImplemented or isinstance(x, Tensor) for x in parts) else repr(found)


def _readers() -> list[tuple[str, Callable[..., Any], Callable[[Tensor], tuple[Any, ...]]]]:
    """Torch's functions that show Python other values for tensors of one form, each with arguments that it takes."""
    a, b = torch.tensor([[0.3, 2.0], [0.0, 5.0]]), torch.tensor([[1.5, 0.0], [0.7, 0.0]])
    calls: list[Callable[[Tensor], tuple[Any, ...]]] = [
        lambda x: (x,),
        lambda x: (x[0, 0],),
        lambda x: (x[0, 0].long(),),
        lambda x: (torch.quantize_per_tensor_dynamic(x, torch.quint8, False),),
        lambda x: (x.to_sparse(),),
        lambda x: (x, torch.tensor([[0.3, 2.0], [0.0, 5.0]])),
        lambda x: (x, 2.0),
        lambda x: (x[0, 0], ".2f"),
    ]
    found = []
    for func in get_testing_overrides():
        name = resolve_name(func) or getattr(func, "__name__", str(func))
        if re.search(r"(^|\.)_[a-z]", name) and "Tensor" not in name:
            continue  # internal functions may end the process if their arguments do not fit
        for call in calls:
            shown = [_values(func, call(x.clone())) for x in (a, b)]
            if None not in shown and shown[0] != shown[1]:
                found.append((name, func, call))
                break
    return found


def test_every_function_of_torch_that_shows_values_is_an_obstacle() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        readers = _readers()
        names = {name.rpartition("Tensor.")[2] for name, _, _ in readers}
        assert {"item", "q_scale", "_nnz", "equal", "__format__", "tolist", "data_ptr"} <= names
        silent = []
        for name, func, call in readers:
            try:

                def read(y: Tensor, func: Any = func, call: Any = call) -> int:
                    return zlib.crc32(repr(func(*call(y[:2, :2].detach()))).encode())

                record(Net(read), (torch.eye(4),))
                silent.append(name)
            except CaptureError:
                continue
    assert not silent


def test_a_check_that_returns_nothing_is_made_again() -> None:
    def check(y: Tensor) -> None:
        torch._assert_async(y.detach().max() < 100)

    model = rewritten(Net(check), torch.randn(3, 4), method="float", check=True)
    model(torch.randn(3, 4))
    with pytest.raises(RuntimeError, match="nonzero"):
        model(torch.full((3, 4), 1e6) * torch.sign(model.first.weight.sum(0)))


def test_a_check_by_values_is_refused() -> None:
    with pytest.raises(CaptureError, match="__bool__"):
        record(Net(lambda y: torch.testing.assert_close(y.clamp(max=10), y)), (torch.randn(3, 4),))


class Log(nn.Module):
    """A part that returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Tensor] = []
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, y: Tensor) -> None:
        self.values.append(y.detach().mean())
        if not self.training:
            self.count += 1


class Logged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.log, self.middle, self.last = nn.Linear(4, 4), Log(), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        self.log(y)
        return self.last(self.middle(y))


@pytest.mark.parametrize("method", ["float", "pfq"])
def test_a_part_that_returns_nothing_is_called(method: str) -> None:
    plain = Logged()
    model, x = rewritten(plain, torch.randn(3, 4), method=method, check=True), torch.randn(3, 4)
    assert not plain.log.values
    for mode, calls in ((True, 2), (False, 3)):
        model.train(mode)
        for _ in range(calls):
            model(x)
    assert len(plain.log.values) == 5 and plain.log.count == 3
    assert torch.allclose(plain.log.values[-1], plain.first(x).mean(), atol=0.1)


LOGGED: list[int] = []


def notes_positives(y: Tensor) -> Any:
    for row in y.tolist():
        LOGGED.append(sum(each > 0 for each in row))
    return torch.ones(()) if LOGGED[-1] > 3 else None


def test_a_function_that_reads_values_and_returns_nothing_is_called_and_must_go_on_returning_nothing() -> None:
    class Counting(Net):
        def forward(self, x: Tensor) -> Any:
            notes_positives(x)
            return super().forward(x)

    model = rewritten(Counting(lambda y: None), -torch.ones(3, 4), method="float", check=True)
    model(-torch.ones(3, 4))  # is compared with the model, which logs too
    LOGGED.clear()
    model(-torch.ones(3, 4))
    assert LOGGED == [0, 0, 0]
    with pytest.raises(InputError, match="returned None"):
        model(torch.ones(3, 4))


class Retries(nn.Module):
    """Takes another way if a call of torch, or a layer, raises an error for the values that it gets."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.table, self.layer, self.call = nn.Embedding(4, 4), nn.Linear(4, 4), call

    def forward(self, x: Tensor) -> Tensor:
        try:
            y = self.table(x.long()) if self.call == "a layer" else torch.linalg.cholesky(x)
        except (RuntimeError, IndexError):
            y = x - 1
        return self.layer(y)


@pytest.mark.parametrize("call", ["a call of torch", "a layer"])
@pytest.mark.parametrize("fails", [True, False])
def test_a_caught_error_keeps_its_module_whole(call: str, fails: bool) -> None:
    good, bad = torch.eye(4), 5 * torch.ones(4, 4) - torch.eye(4)
    examples = (bad, good) if fails else (good, bad)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = rewritten(
            nn.Sequential(nn.Identity(), Retries(call), nn.Linear(4, 4)), examples[0], config=FracConfig(method="float")
        )
    original = copy.deepcopy(model.restore())
    if fails:
        assert "it catches" in model.leaves["1"]
        for x in (*examples, *examples):
            assert torch.equal(model(x), original(x))
        with pytest.raises(CaptureError, match=r"Error it catches\), at .*test_value_reads\.py:\d+"):
            record(Retries(call), (bad,))
    else:  # the graph lacks the other way
        assert torch.equal(model(good), original(good))
        with pytest.raises((RuntimeError, IndexError, InputError)):
            model(bad)
