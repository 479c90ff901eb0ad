"""Code that looks at sizes: at other sizes the rewritten model equals the original, or says what it is tied to."""

from __future__ import annotations

import functools
import itertools
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, log, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fractrain_fx import FracConfig, FracModel, RunConfig, fractrainify, summarize
from fractrain_fx.capture.sizes.guards import Place, place_of
from fractrain_fx.errors import CaptureError, InputError
from tests.build import rewritten as build_rewritten
from tests.models import thinned

Code = Callable[["Layers", Tensor], Any]


class Layers(nn.Module):
    """Layers for one probe, whose code is its forward. Inputs are (batch, length, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.cell = nn.GRUCell(4, 4)
        self.table = nn.Parameter(torch.randn(32, 4))
        self.scales = nn.ParameterList(nn.Parameter(torch.randn(4)) for _ in range(12))
        self.floats = [0.5 * i for i in range(40)]
        self.cache: dict[Any, Tensor] = {}


PROBES: dict[str, tuple[Code, bool]] = {}


def probe(code: Code) -> Code:
    """Note a probe."""
    PROBES[code.__name__] = code, False
    return code


def refused_probe(code: Code) -> Code:
    """Note a probe whose model cannot be recorded: the error names the place."""
    PROBES[code.__name__] = code, True
    return code


@probe
def loop_over_a_length(m: Layers, x: Tensor) -> Tensor:
    out = x[:, 0] * 0
    for t in range(x.shape[1]):
        out = out + m.linear(x[:, t]) * t
    return out


@probe
def gru_cell_loop(m: Layers, x: Tensor) -> Tensor:
    h = x[:, 0] * 0
    for t in range(x.size(1)):
        h = m.cell(x[:, t], h)
    return m.linear(h)


@probe
def while_on_a_length(m: Layers, x: Tensor) -> Tensor:
    h = m.linear(x)
    while h.shape[1] > 3:
        h = h[:, 1:]
    return h


@probe
def branch_on_a_length(m: Layers, x: Tensor) -> Tensor:
    return m.linear(x) if x.shape[1] >= 6 else m.other(x)


@probe
def logarithm_of_a_length(m: Layers, x: Tensor) -> Tensor:
    return m.linear(x) * math.log(x.size(1))


@probe
def logarithm_imported_by_name(m: Layers, x: Tensor) -> Tensor:
    return m.linear(x) * log(x.size(1)) + sqrt(x.size(1) / 3) + ceil(x.size(1) / 2)


@probe
def root_to_int(m: Layers, x: Tensor) -> Tensor:
    return m.linear(x)[:, : int(math.sqrt(x.shape[1]))]


@probe
def share_to_int(m: Layers, x: Tensor) -> Tensor:
    return m.linear(x)[:, int(0.25 * x.shape[1]) :]


@probe
def list_over_positions(m: Layers, x: Tensor) -> Tensor:
    return torch.stack([m.linear(x[:, t]) * (t + 1) for t in range(x.shape[1])], 1)


@probe
def number_of_parts(m: Layers, x: Tensor) -> Tensor:
    return sum((m.linear(part).sum(1) * i for i, part in enumerate(x.split(2, dim=1))), x[:, 0])


@probe
def number_of_chunks(m: Layers, x: Tensor) -> Tensor:
    parts = x.chunk(4, dim=1)
    return m.linear(parts[-1]).sum(1) * len(parts)


@probe
def share_of_the_batch(m: Layers, x: Tensor) -> Tensor:
    return m.linear(x)[: int(0.5 * x.shape[0])]


@probe
def parts_unused_but_counted(m: Layers, x: Tensor) -> Tensor:
    total = 0
    for i, _ in enumerate(x.unbind(1)):
        total = total + i
    return m.linear(x) * total


@probe
def divmod_of_a_length(m: Layers, x: Tensor) -> Tensor:
    whole, rest = divmod(x.shape[1], 2)
    return F.pad(m.linear(x), (0, 0, 0, rest)).view(x.shape[0], whole + rest, 2, 4)


@probe
def slices_with_steps(m: Layers, x: Tensor) -> Tensor:
    n = x.shape[1]
    return m.linear(x)[:, : n // 2 : 2] + m.linear(x)[:, n - 1 : n : 1].mean(1, keepdim=True)


@probe
def arange_of_half(m: Layers, x: Tensor) -> Tensor:
    return m.linear(x)[:, torch.arange(x.shape[1] // 2)]


@probe
def nested_loops(m: Layers, x: Tensor) -> Tensor:
    out = x[:, 0] * 0
    for i in range(x.shape[1]):
        for j in range(i):
            out = out + m.linear(x[:, i]) * j
    return out


@probe
def length_of_a_list_built_in_a_loop(m: Layers, x: Tensor) -> Tensor:
    rows = []
    for row in x.unbind(1):
        rows.append(m.linear(row))
    return rows[0] * len(rows)


@probe
def sizes_through_tuples(m: Layers, x: Tensor) -> Tensor:
    pair = (x.shape[0], (x.shape[1], 4))
    return m.linear(x).reshape(pair[0] * pair[1][0], pair[1][1]) / pair[1][0]


@dataclass
class Form:
    batch: int
    length: int


@probe
def sizes_through_dataclasses(m: Layers, x: Tensor) -> Tensor:
    form = Form(*x.shape[:2])
    return m.linear(x).view(form.batch, -1)[:, : form.length] * (2 if form.length > 6 else 3)


@probe
def cache_of_tables_by_length(m: Layers, x: Tensor) -> Tensor:
    n = x.shape[1]
    if n not in m.cache:
        m.cache[n] = torch.arange(n)[:, None] * 0.1
    return m.linear(x) + m.cache[n]


@functools.lru_cache
def _weights(n: int) -> tuple[float, ...]:
    return tuple(1 / (i + 1) for i in range(n))


@probe
def lru_cache_by_length(m: Layers, x: Tensor) -> Tensor:
    return m.linear(x) * torch.tensor(_weights(x.shape[1]))[:, None]


@probe
def constant_view_by_chance(m: Layers, x: Tensor) -> Tensor:
    return m.linear(x).reshape(x.shape[0], -1)[:, :20] if x.shape[1] == 5 else m.linear(x).flatten(1)


@probe
def list_indexed_by_a_length(m: Layers, x: Tensor) -> Tensor:
    return m.linear(x) * m.floats[x.shape[1]]


@probe
def list_cut_at_a_length(m: Layers, x: Tensor) -> Tensor:
    return m.linear(x) * sum(m.floats[: x.shape[1]])


@probe
def layers_up_to_a_length(m: Layers, x: Tensor) -> Tensor:
    for scale in list(m.scales)[: x.shape[1]]:
        x = m.linear(x) * scale
    return x


@probe
def repeated_list(m: Layers, x: Tensor) -> Tensor:
    return m.linear(x) * torch.tensor([0.5] * x.shape[1])[:, None]


@probe
def product_by_numpy(m: Layers, x: Tensor) -> Tensor:
    return m.linear(x).reshape(x.shape[0], int(np.prod(x.shape[1:]))) / np.sqrt(x.shape[1])


@probe
def array_of_a_length(m: Layers, x: Tensor) -> Tensor:
    return m.linear(x) * torch.from_numpy(np.linspace(0, 1, x.shape[1], dtype=np.float32))[:, None]


@probe
def elements_of_the_shape(m: Layers, x: Tensor) -> Tensor:
    return m.linear(x) / x.shape.numel()


@probe
def bytes_and_strides(m: Layers, x: Tensor) -> Tensor:
    return m.linear(x) / x.nbytes + x.stride(0)


@probe
def text_of_a_length(m: Layers, x: Tensor) -> Tensor:
    return getattr(m, {"5": "linear"}.get(f"{x.shape[1]}", "other"))(x)


@probe
def maximum_of_lengths(m: Layers, x: Tensor) -> Tensor:
    return m.linear(x)[:, : max(x.shape[1] - 3, 1)] * min(x.shape[1], 6)


@probe
def bits_of_a_length(m: Layers, x: Tensor) -> Tensor:
    n = x.shape[1]
    return m.linear(x) * (n >> 1) + (n & 1) + n.bit_length() + (~n)


@probe
def truth_of_a_rest(m: Layers, x: Tensor) -> Tensor:
    return m.linear(x) if x.shape[1] % 2 else m.other(x)


@probe
def padding_to_a_multiple(m: Layers, x: Tensor) -> Tensor:
    rest = (-x.shape[1]) % 4
    if rest:
        x = F.pad(x, (0, 0, 0, rest))
    return m.linear(x.view(x.shape[0], -1, 4, 4)).mean(2)


@probe
def windows_counted(m: Layers, x: Tensor) -> Tensor:
    count = x.shape[1] // 2
    return torch.cat([m.linear(x[:, 2 * i : 2 * i + 2]) * i for i in range(count)], 1)


@probe
def recursion_on_a_length(m: Layers, x: Tensor) -> Tensor:
    def halved(y: Tensor) -> Tensor:
        return y if y.shape[1] < 2 else halved(m.linear(y[:, ::2]))

    return halved(x)


@probe
def zipped_positions(m: Layers, x: Tensor) -> Tensor:
    out = x[:, 0]
    for t, scale in zip(range(x.shape[1]), itertools.count(1), strict=False):
        out = out + m.linear(x[:, t]) / scale
    return out


@probe
def steps_of_a_range(m: Layers, x: Tensor) -> Tensor:
    return torch.cat([m.linear(x[:, t : t + 2]) * t for t in range(0, x.shape[1], 2)], 1)


@probe
def reversed_range(m: Layers, x: Tensor) -> Tensor:
    h = x[:, 0]
    for t in range(x.shape[1] - 1, -1, -1):
        h = m.linear(h) + x[:, t]
    return h


@probe
def comparison_of_two_lengths(m: Layers, x: Tensor) -> Tensor:
    y = x[:, 1:]
    return m.linear(x[:, : y.shape[1]]) + y if x.shape[1] != y.shape[1] else x


@probe
def shape_compared_whole(m: Layers, x: Tensor) -> Tensor:
    return m.linear(x) if x.shape[1:] == (5, 4) else m.other(x)


@probe
def average_over_length_in_python(m: Layers, x: Tensor) -> Tensor:
    return m.linear(x).sum(1) * (1 / float(x.shape[1])) + round(x.shape[1] / 3)


@probe
def power_of_a_length(m: Layers, x: Tensor) -> Tensor:
    return m.linear(x) * x.shape[1] ** -0.5 + 2 ** (x.shape[1] - 3) + abs(3 - x.shape[1])


@probe
def sizes_of_results(m: Layers, x: Tensor) -> Tensor:
    y = F.avg_pool1d(m.linear(x).transpose(1, 2), 2)
    return y * 2 if y.shape[-1] > 2 else y * 3


@probe
def iteration_over_a_tensor(m: Layers, x: Tensor) -> Tensor:
    return sum((m.linear(row) * i for i, row in enumerate(x.transpose(0, 1))), x[:, 0])


@probe
def unpacked_parts(m: Layers, x: Tensor) -> Tensor:
    first, *rest = m.linear(x).unbind(1)
    return first + sum(rest) / len(rest)


@probe
def pairs_of_positions(m: Layers, x: Tensor) -> Tensor:
    pairs = list(itertools.combinations(range(x.shape[1]), 2))
    return sum((m.linear(x[:, i] - x[:, j]) for i, j in pairs), x[:, 0]) / len(pairs)


@probe
def number_of_dimensions(m: Layers, x: Tensor) -> Tensor:
    return m.linear(x).mean(1) if x.ndim == 3 else m.other(x)


@probe
def hyperbolic_of_a_length(m: Layers, x: Tensor) -> Tensor:
    return m.linear(x) * math.tanh(x.shape[1] / 8) + math.gcd(x.shape[1], 6) + math.comb(x.shape[1], 2)


@probe
def ordered_lengths(m: Layers, x: Tensor) -> Tensor:
    return m.linear(x) * sorted([x.shape[1], 6, 4])[1]


@probe
def sampled_positions(m: Layers, x: Tensor) -> Tensor:
    return m.linear(x)[:, np.arange(x.shape[1])[::2].copy()]


@refused_probe
def number_of_hits(m: Layers, x: Tensor) -> Tensor:
    hits = (m.linear(x)[:, 0, 0] > 0).nonzero().squeeze(-1)
    return m.linear(x[hits]).sum(0) if hits.numel() else m.other(x).sum(0)


@refused_probe
def masked_rows_counted(m: Layers, x: Tensor) -> Tensor:
    rows = x[m.other(x)[..., 0] > 0]
    return m.linear(rows).sum(0) if len(rows) > 5 else m.other(x).sum((0, 1))


@refused_probe
def unique_values_counted(m: Layers, x: Tensor) -> Tensor:
    values = m.linear(x).round().unique()
    return m.linear(x) * values.shape[0] if values.shape[0] > 3 else m.other(x)


@refused_probe
def experts_with_tokens(m: Layers, x: Tensor) -> Tensor:
    chosen, out = m.other(x)[..., :2].argmax(-1).flatten(), x.flatten(0, 1) * 0
    for k, layer in enumerate((m.linear, m.other)):
        n = (chosen == k).nonzero().squeeze(-1)
        if n.numel():
            out = out.index_add(0, n, layer(x.flatten(0, 1)[n]))
    return out


@probe
def labels_that_may_be_missing(m: Layers, x: Tensor) -> Tensor:
    rows = (x[:, 0, 0] > -9).nonzero().squeeze(-1)
    return m.linear(x[rows]).sum(0) if rows.numel() > 0 else x[0] * 0


def built(code: Code) -> tuple[nn.Module, FracModel]:
    model = type("Probe", (Layers,), {"forward": code})()
    config = FracConfig(method="float", run=RunConfig(recordings=12))
    return model, build_rewritten(model, torch.randn(2, 5, 4), config=config, check=True)


SHAPES = [(2, 5, 4), (1, 5, 4), (2, 6, 4), (2, 4, 4), (4, 9, 4), (2, 2, 4)]


@pytest.mark.parametrize("name", thinned(PROBES, 3))
def test_other_sizes_give_what_the_model_gives_or_are_refused(name: str) -> None:
    code, refused = PROBES[name]
    torch.manual_seed(0)
    if refused:
        with pytest.raises(CaptureError, match=r"a size that data decide|depends on values"):
            built(code)
        return
    model, rewritten = built(code)
    equal = 0
    for shape in SHAPES:
        x = torch.randn(shape)
        try:
            expected = model(x)
        except (RuntimeError, ValueError, IndexError, TypeError, ZeroDivisionError):
            continue
        assert torch.equal(rewritten(x), expected), shape
        equal += 1
    assert equal > 3


def test_one_recording_serves_all_sizes_at_which_its_conditions_hold() -> None:
    _, rewritten = built(branch_on_a_length)
    assert [str(guard) for guard in rewritten.guards] == ["x.size(1) < 6"]
    first = rewritten._state.variants.first
    for length in (5, 2, 8, 7, 20, 3):
        rewritten(torch.randn(2, length, 4))
    assert [variant is first for variant in rewritten._state.variants] == [True, False]


def test_inputs_with_other_dimensions_are_recorded_anew() -> None:
    model, rewritten = built(number_of_dimensions)
    for shape in ((2, 5, 4), (5, 4), (3, 4)):
        x = torch.randn(shape)
        assert torch.equal(rewritten(x), model(x))


def test_a_call_that_no_recording_may_be_made_for_names_the_line_and_both_sizes() -> None:
    model = type("Probe", (Layers,), {"forward": loop_over_a_length})()
    config = FracConfig(method="float", run=RunConfig(recordings=1))
    rewritten = fractrainify(model, config=config, example_inputs=(torch.randn(2, 5, 4),))
    sizes = r"x was float32 \(2, 5, 4\) and is float32 \(2, 7, 4\)"
    with pytest.raises(InputError, match=rf"{sizes}.*== 5, which .*test_guards\.py:\d+ \(for t in range.*recordings"):
        rewritten(torch.randn(2, 7, 4))
    assert "range(x.shape[1])" in str(summarize(rewritten))


def test_another_answer_of_the_values_of_inputs_is_an_error_that_names_the_line() -> None:
    _, rewritten = built(labels_that_may_be_missing)
    with pytest.raises(InputError, match=r"another way than the recorded one .*> 0.*test_guards\.py"):
        rewritten(torch.full((2, 5, 4), -10.0))


class Flips(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flip(1) if random.random() < 0.5 else x


def test_a_look_at_new_shapes_draws_no_random_numbers() -> None:
    class Augmented(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flips, self.linear = Flips(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(self.flips(x))
            return y * 2 if y.shape[1] > 3 else y

    model = Augmented()
    rewritten = fractrainify(model, config=FracConfig(method="float"), example_inputs=(torch.randn(2, 5, 4),))
    for length in (4, 6, 8, 9):
        x = torch.randn(2, length, 4)
        random.seed(length)
        expected = model(x), random.random()
        random.seed(length)
        assert torch.equal(rewritten(x), expected[0])
        assert random.random() == expected[1]


def test_a_look_at_new_shapes_leaves_what_modules_keep_for_themselves() -> None:
    class Grid(nn.Module):
        table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None or len(self.table) != x.shape[1]:
                self.table = torch.arange(x.shape[1], device=x.device)[:, None] * 0.1
            return x + self.table

    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grid, self.linear = Grid(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(self.grid(x))
            return y * 2 if y.shape[1] > 3 else y

    model = Placed()
    rewritten = fractrainify(model, config=FracConfig(method="float"), example_inputs=(torch.randn(2, 5, 4),))
    for length in (5, 7, 5, 3):
        x = torch.randn(2, length, 4)
        assert torch.equal(rewritten(x), model(x))


def test_a_table_looked_up_by_python_is_found_by_comparing_the_first_call_of_a_length() -> None:
    model, rewritten = built(list_indexed_by_a_length)
    x = torch.randn(2, 6, 4)
    assert rewritten.guards == () and torch.equal(rewritten(x), model(x))
    assert len(list(rewritten._state.variants)) == 2


class Masked(nn.Module):
    """Drops a share of its positions, in train mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.training:
            h = h[:, : int(0.75 * x.shape[1])]
        return self.b(h)


def test_a_share_of_the_length_that_only_train_mode_takes_follows_the_length() -> None:
    model = Masked()
    rewritten = fractrainify(model, config=FracConfig(method="float"), example_inputs=(torch.randn(2, 8, 8),))
    x = torch.randn(2, 40, 8)
    assert rewritten.train()(x).shape == (2, 30, 8) == model.train()(x).shape
    assert torch.equal(rewritten.eval()(x), model.eval()(x))


@pytest.mark.parametrize(
    ("module", "of_model"),
    [
        ("functools_of_mine", True),
        ("numpyro.nn", True),
        ("fractrain_fx.zoo.models.resnet", True),
        ("functools", False),
        ("numpy.lib", False),
        ("torch.nn.functional", False),
        ("fractrain_fx.capture.trees", False),
    ],
)
def test_a_guard_names_a_line_of_the_model_and_of_no_library(module: str, of_model: bool) -> None:
    found: list[Place] = []
    names = {"__name__": module, "ask": lambda: found.append(place_of(sys._getframe(1)))}
    exec(compile("ask()", "model.py", "exec"), names)
    assert (found[0].file == "model.py") == of_model
