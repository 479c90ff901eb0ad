"""Watched steps: what they measure is true, and the training is the one that was not watched."""

from __future__ import annotations

import contextlib
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fractrain_fx import Engine, FracConfig, FracModel, FracTrainWarning, Pin, Precision, Steps, fractrainify
from fractrain_fx.config import AffineConfig, RunConfig
from fractrain_fx.distributed import fully_shard
from fractrain_fx.errors import ConfigError, InputError, RunError
from fractrain_fx.execution.fused_op import FusedOp
from fractrain_fx.formats.affine import fake_quantize
from fractrain_fx.formats.microscaling import fake_quantize as round_blocks
from fractrain_fx.numerics import Watch, WatchedStep, read_steps, watch
from tests.build import made_once, paper
from tests.build import rewritten as build_rewritten
from tests.models import thinned

EIGHT = FracConfig(method="static", precision="FW-8/BW-8")


class Net(nn.Module):
    """Convolutions with a residual block, and an op of three factors that has no fused form."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.block = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 1))
        self.next = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 1))
        self.hidden = nn.Linear(16, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = (x + self.block(x)).relu()
        x = (x + self.next(x)).relu()
        return self.head(self.hidden(x.mean((2, 3))).relu())


@made_once
def rewritten(config: FracConfig = EIGHT) -> FracModel:
    torch.manual_seed(0)
    return build_rewritten(Net(), torch.rand(2, 3, 8, 8), config=config)


def batch(step: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    return torch.randn(8, 3, 8, 8, generator=drawn), torch.randint(10, (8,), generator=drawn)


def train(model: Any, steps: int = 4, *, engine: bool = True, **options: Any) -> tuple[list[float], Watch | None]:
    """Losses of some steps, watched if there are options."""
    torch.manual_seed(1)
    steered = Engine(model, epochs=1) if engine else None
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    watched = watch(model, **options) if options else None
    with watched or contextlib.nullcontext():
        for step in range(steps):
            x, y = batch(step)
            loss = nn.functional.cross_entropy(model(x), y)
            (steered.loss(loss) if steered else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, watched


def test_a_step_prints_the_operands_first_that_rounding_leaves_least_of() -> None:
    config = FracConfig(method="static", precision="FW-8/BW-8", pins=(Pin("block.0", Precision(2, 8)),))
    _, watched = train(rewritten(config), 1, as_if="FW-4/BW-4")
    assert watched is not None
    lines = str(watched.records[0]).splitlines()
    rows = [line.split() for line in lines if line.strip().startswith(("block", "next", "hidden"))]
    assert "FW-4/BW-4" in lines[2] and {row[0] for row in rows[:2]} == {"block.0"}
    ratios = [int(row[5]) for row in rows]
    assert ratios == sorted(ratios)
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize(
    "config",
    thinned(
        [
            EIGHT,
            FracConfig(method="fractrain"),
            paper(run=RunConfig(skipping="left-out")),
            FracConfig(method="static", precision="FW-4/BW-4", format="nvfp4"),
            FracConfig(method="static", precision="FW-4/BW-4", format="mx"),
            FracConfig(method="static", precision="FW-8/BW-8", format="dorefa"),
            FracConfig(method="static", precision="FW-8/BW-8", format="wageubn"),
            FracConfig(method="static", precision="FW-8/BW-8", affine=AffineConfig(ranges="row")),
        ],
        2,
    ),
    ids=lambda config: f"{config.method}-{config.format}-{config.affine.ranges}-{config.run.skipping}",
)
def test_a_watched_training_is_the_same_bit_for_bit(config: FracConfig) -> None:
    plain, ours = rewritten(config), rewritten(config)
    losses, _ = train(plain)
    watched_losses, watched = train(ours, every=Steps(2), as_if=("mxfp4", "nvfp4"))
    assert watched_losses == losses
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), ours.state_dict().values(), strict=True))
    assert watched is not None and [record.step for record in watched.records] == [1, 3]
    assert all(record.operands and record.ran == "eager" for record in watched.records)


def test_the_numbers_are_those_of_the_rounded_tensors() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    model = fractrainify(net, config=EIGHT, example_inputs=(torch.randn(2, 16),))
    x = torch.randn(32, 16)
    x[:, 3] = 0.0
    with watch(model) as watched:
        model(x).square().mean().backward()
    (seen,) = watched.records
    given, weight = net.get_submodule("0")(x).detach(), net.get_parameter("1.weight").detach()
    for letter, values, rounded in (
        ("x", given, fake_quantize(given, 8)),
        ("w", weight, fake_quantize(weight, 8, dim=0)),
    ):
        found = seen.of("1", letter, "FW")
        noise = (rounded - values).norm() / values.norm()
        assert found.sqnr == pytest.approx(-20 * math.log10(noise), abs=0.05)
        assert found.sqnr is not None and found.effective_bits == pytest.approx((found.sqnr - 1.76) / 6.02)
        assert (found.lo, found.hi) == (values.min().item(), values.max().item())
        assert (found.bits, found.clipped, found.zero, found.finite) == (8, 0, 0, True)
    assert seen.of("1", "x", "GC") == seen.of("1", "x", "FW")
    assert seen.of("1", "x").running == pytest.approx((given.min().item(), given.max().item()))
    assert seen.of("1", "g", "EB").sqnr is not None and seen.of("1", "y").sqnr is None


def test_what_is_zero_clipped_and_underflowed_is_counted() -> None:
    net = nn.Sequential(nn.Identity(), nn.Linear(64, 8, bias=False))
    pins = (Pin("*", Precision(8, 8)),)
    model = fractrainify(net, config=EIGHT.replace(pins=pins), example_inputs=(torch.randn(2, 64),))
    x = torch.zeros(4, 64)
    x[:, :16] = 1e-6  # becomes the level of 0
    x[:, 16:32] = 1.0
    with watch(model, as_if=["mxfp8", "nvfp4"]) as watched:
        model(x).sum().backward()
    (seen,) = watched.records
    assert (seen.of("1", "x").zero, seen.of("1", "x").underflowed) == (0.5, 0.25)
    blocks = seen.of("1", "x", "FW", "mxfp8")
    assert blocks.scales == {-8: 4}  # 1.0 is 2^-8 times 256; the other blocks are zeros, which need no scale
    assert blocks.saturated == 0.0
    own = seen.of("1", "x", "FW", "nvfp4")  # a block of 1e-6 beside one of 1.0: below the least scale
    assert own.saturated == 0.5 and own.underflowed == 0.25


def test_another_format_or_precision_is_measured_on_the_same_tensors() -> None:
    model = rewritten()
    _, watched = train(model, 1, as_if=["mxfp4", "FW-4/BW-6", "affine:FW-2/BW-2", "mxfp8-nvfp4"])
    assert watched is not None
    seen = watched.records[0]
    at_8, at_4, at_2 = (seen.of("hidden", "x", "FW", name) for name in ("", "FW-4/BW-6", "affine:FW-2/BW-2"))
    assert at_8.sqnr > at_4.sqnr + 18 > at_2.sqnr + 18  # type: ignore[operator]
    assert (at_4.bits, seen.of("hidden", "g", "EB", "FW-4/BW-6").bits) == (4, 6)
    assert at_8.lo == at_4.lo == seen.of("hidden", "x", "FW", "mxfp4").lo
    assert [seen.of("hidden", "x", product, "mxfp8-nvfp4").bits for product in ("FW", "GC")] == [8, 4]
    with pytest.raises(InputError, match="no operand 'x' of 'hidden' as mx"):
        seen.of("hidden", "x", "FW", "mx")
    with pytest.raises(InputError, match=r"no operand 'x' of 'hiden'\. Did you mean 'hidden'"):
        seen.of("hiden", "x")


def test_a_block_format_is_measured_as_each_product_rounds_it() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8))
    config = FracConfig(method="static", precision="FW-8/BW-8", format="mx")
    model = fractrainify(net, config=config, example_inputs=(torch.randn(2, 64),))
    x = torch.randn(32, 64)
    with watch(model) as watched:
        model(x).square().mean().backward()
    given = net[0](x).detach()
    for product, axis in (("FW", 1), ("GC", 0)):
        noise = (round_blocks(given, "e4m3", axis=axis) - given).norm() / given.norm()
        assert watched.records[0].of("1", "x", product).sqnr == pytest.approx(-20 * math.log10(noise), abs=0.05)
    assert sum((watched.records[0].of("1", "x").scales or {}).values()) == 64


def test_every_operand_is_in_the_record_once_although_backward_computes_activations_again() -> None:
    plain, again = rewritten(), rewritten()
    again.gradient_checkpointing_enable()
    found = []
    for model in (plain, again):
        losses, watched = train(model, 2, every=1)
        assert watched is not None
        found.append((losses, sorted((each.op, each.operand) for each in watched.records[1].operands)))
    assert found[0] == found[1]
    assert len(set(found[0][1])) == len(found[0][1]) == 20


def test_gates_are_seen_by_mutual_information_and_the_commonest_configuration() -> None:
    model = rewritten(FracConfig(method="fractrain"))
    _, watched = train(model, 1, every=1)
    assert watched is not None
    seen = watched.records[0]
    assert seen.commonest is not None
    options, share = seen.commonest
    assert (
        set(options) == set(seen.information) == {block.name for block in model.blocks if block.gated}
        and 0 < share <= 1
    )
    assert all(information >= 0 for information in seen.information.values())


def test_ops_without_a_fused_form_and_ops_of_dispatched_blocks_are_seen_too() -> None:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.mixed, self.last = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x).relu()
            return self.last(torch.einsum("ab,cb->a", x, self.mixed).unsqueeze(1) + x)

    torch.manual_seed(0)
    model = fractrainify(Three(), config=EIGHT, example_inputs=(torch.randn(4, 8),))
    apart = [name for name, found in model.backends().items() if found.backend == "quantizers"]
    assert len(apart) == 1
    with watch(model, as_if="mxfp8") as watched:
        model(torch.randn(4, 8)).square().mean().backward()
    (name,) = apart
    seen = watched.records[0]
    assert {each.operand for each in seen.operands if each.op == name} == {"x", "w", "g", "y"}
    assert seen.of(name, "x").sqnr > seen.of(name, "x", "FW", "mxfp8").sqnr > 20  # type: ignore[operator]


def test_lines_of_a_file_hold_the_records(tmp_path: Path) -> None:
    _, watched = train(rewritten(FracConfig(method="fractrain")), every=2, as_if="mxfp4", out=tmp_path / "run")
    assert watched is not None
    lines = (tmp_path / "run" / "numerics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 3]
    for read, kept in zip(read_steps(tmp_path / "run" / "numerics.jsonl"), watched.records, strict=True):
        assert read.to_dict() == kept.to_dict()
        for ours, theirs in zip(read.operands, kept.operands, strict=True):
            assert (ours.op, ours.operand, ours.products) == (theirs.op, theirs.operand, theirs.products)
            assert ours.statistics.largest == pytest.approx(theirs.statistics.largest, rel=1e-3)


def test_a_file_of_records_that_is_cut_off_is_read_up_to_there_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "numerics.jsonl"
    line = json.dumps(WatchedStep(1, "eager", ()).to_dict())
    path.write_text(f"{line}\n{line[:20]}")
    assert [step.step for step in read_steps(path)] == [1]
    path.write_text(f"{line[:20]}\n{line}\n")
    with pytest.raises(RunError, match=r"line 1 of .*numerics.jsonl is not a watched step"):
        list(read_steps(path))


def test_a_line_that_a_killed_process_left_unfinished_is_dropped_before_the_next(tmp_path: Path) -> None:
    path, model = tmp_path / "numerics.jsonl", rewritten()
    train(model, 2, every=1, out=path)
    path.write_text(path.read_text()[:-50])
    train(model, 2, every=1, out=path)
    assert [step.step for step in read_steps(path)] == [1, 1, 2]


def test_steps_that_a_file_takes_do_not_pile_up_in_memory(tmp_path: Path) -> None:
    model = rewritten()
    _, watched = train(model, 4, every=1, out=tmp_path)
    assert watched is not None and [record.step for record in watched.records] == [3, 4]
    assert [step.step for step in read_steps(tmp_path / "numerics.jsonl")] == [1, 2, 3, 4]
    told: list[int] = []
    with Watch(model, every=1, told=lambda step: told.append(step.step)) as heard:
        train(model, 3)
    assert (told, [record.step for record in heard.records]) == ([1, 2, 3], [2, 3])


def test_a_watch_that_an_ended_run_of_a_trainer_left_open_yields() -> None:
    class Run:
        """The run of a trainer, which ends without closing its watch."""

    model, first, second = rewritten(), Run(), Run()
    Watch(model, every=1, run=first).__enter__()
    for other in (watch(model), Watch(model, run=first)):
        with pytest.raises(ConfigError, match="being watched already"), other:
            pass
    with Watch(model, every=1, run=second) as watched:  # one trainer trains a model at a time
        train(model, 2)
    assert [record.step for record in watched.records] == [1, 2]
    Watch(model, every=1, run=first).__enter__()
    del first
    with watch(model, every=1) as watched:
        train(model, 2)
    assert [record.step for record in watched.records] == [1, 2]


@pytest.mark.long
@pytest.mark.parametrize("in_place", [False, True])
def test_a_watched_step_of_a_compiled_model_runs_eagerly_and_says_so(in_place: bool) -> None:
    model = rewritten()
    if in_place:
        model.compile(backend="aot_eager")
    called = model if in_place else torch.compile(model, backend="aot_eager")
    _, watched = train(called, 5, engine=False, every=2)
    assert watched is not None
    assert [record.step for record in watched.records] == [1, 3, 5]
    assert {record.ran for record in watched.records} == {
        "eager, in place of compiled code, which may differ in the last bits"
    }
    assert all(len(record.operands) == 20 for record in watched.records)


@pytest.mark.long
def test_segments_that_are_compiled_and_computed_again_are_watched() -> None:
    model = rewritten()
    model.gradient_checkpointing_enable()
    model.compile_segments(backend="aot_eager")
    _, watched = train(model, 3, engine=False, every=2)
    assert watched is not None and [len(record.operands) for record in watched.records] == [20, 20]


def test_steps_that_are_not_watched_look_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[object] = []
    model = rewritten()
    for op in model._state.running[True].fused.values():
        monkeypatch.setattr(op, "choose", partial(_choose, looked, op, op.choose))
    train(model, 3, every=2)
    half = len(looked) // 3
    assert [each is not None for each in looked] == [True] * half + [False] * half + [True] * half


def _choose(looked: list[object], op: FusedOp, choose: Any, *args: Any) -> Any:
    looked.append(op.observer)
    return choose(*args)


def test_evaluation_and_calls_without_gradients_are_no_steps() -> None:
    model = rewritten()
    x, y = batch(0)
    with watch(model, every=1) as watched:
        with torch.no_grad():
            model(x)
        nn.functional.cross_entropy(model(x), y).backward()
        model.eval()
        model(x)
    assert (watched.steps, len(watched.records)) == (1, 1)


def test_a_step_without_a_backward_pass_is_read_with_the_next() -> None:
    model = rewritten()
    with watch(model, every=2) as watched:
        model(batch(0)[0])
        assert watched.records == []
        model(batch(1)[0])
        assert [{each.operand for each in record.operands} for record in watched.records] == [{"x", "w", "y"}]


def _in_one_process(folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_data_parallel_and_sharded_models_are_watched(kind: str, tmp_path: Path) -> None:
    _in_one_process(tmp_path)
    try:
        alone, _ = train(rewritten(), 2)
        model: Any = rewritten()
        model = DistributedDataParallel(model) if kind == "ddp" else fully_shard(model)
        losses, watched = train(model, 2, every=1)
        assert losses == pytest.approx(alone, rel=1e-6)
        assert watched is not None and [len(record.operands) for record in watched.records] == [20, 20]
        assert watched.records[0].of("hidden", "w").hi == pytest.approx(float(first_weights()["hidden.weight"].max()))
    finally:
        dist.destroy_process_group()


def first_weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return Net().state_dict()


def test_a_loop_that_hides_its_steps_is_told(recwarn: pytest.WarningsRecorder) -> None:
    with watch(rewritten()):
        pass
    assert any(
        issubclass(each.category, FracTrainWarning) and "saw no training step" in str(each.message) for each in recwarn
    )


def test_wrong_arguments_name_the_way_out(tmp_path: Path) -> None:
    model = rewritten()
    with pytest.raises(InputError, match="made by fractrainify"):
        watch(Net())
    with pytest.raises(ConfigError, match="as_if='mxfp5' is neither a format or recipe"):
        watch(model, as_if=["mxfp5"])
    with pytest.raises(ConfigError, match="not a number of steps"):
        watch(model, every="often")  # type: ignore[arg-type]
    blocks = rewritten(FracConfig(method="static", precision="FW-4/BW-4", format="nvfp4"))
    with pytest.raises(ConfigError, match="Name a format too, such as 'affine:FW-5/BW-5'"):
        watch(blocks, as_if="FW-5/BW-5")
    with watch(model):
        train(model, 1)
        with pytest.raises(ConfigError, match="being watched already"), watch(model):
            pass
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be a folder"):
        watch(model, out=tmp_path / "file" / "run")
