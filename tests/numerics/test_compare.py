"""A model beside its float twin: what differs, what is to blame, and that the model stays as it was."""

from __future__ import annotations

import json
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from fractrain_fx import FracConfig, Pin, Precision, fractrainify
from fractrain_fx.cli import main
from fractrain_fx.distributed import fully_shard
from fractrain_fx.engine import Engine
from fractrain_fx.errors import ConfigError, InputError, ModelError, NonFiniteLossError
from fractrain_fx.numerics import compare, examine, watch
from tests.numerics.faults import EIGHT, MODELS, rewritten


def pinned(op: str, bits: str) -> Any:
    torch.manual_seed(0)
    subject = MODELS["gpt2"]
    config = EIGHT.replace(pins=(Pin(op, Precision.parse(bits)),))
    return rewritten(subject.build(), subject.batch, config), subject.batch


def test_the_op_at_few_bits_takes_most_of_the_difference_by_switching_and_by_estimate() -> None:
    op = "transformer.h.1.mlp.c_fc"
    model, batch = pinned(op, "FW-2/BW-8")
    for how in ("switched", "estimated"):
        found = compare(model, batch, shares=how)
        assert found.how == how and found.by_share[0].name == op and found.by_share[0].output_share > 0.5
        assert found.output is not None and found.output > 0.01 and found.loss != found.float_loss
    model, batch = pinned(op, "FW-8/BW-2")
    found = compare(model, batch)
    assert found.how == "switched" and found.by_share[0].name == op and found.by_share[0].gradient_share > 0.5


def test_shares_by_switching_are_what_really_goes_if_an_op_is_float() -> None:
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    x = torch.randn(32, 16)
    config = FracConfig(method="static", precision="FW-4/BW-8")
    model = fractrainify(net, config=config, example_inputs=(x,))
    found = compare(model, x)
    rounding = [each for each in found.ops if found.of(each.name, "y") and each.output_share]
    assert [each.name for each in rounding] == ["1", "2"]
    plain = net(x)
    errors = {}
    for left in ("1", "2", ""):
        pins = (Pin(left, format="float"),) if left else ()
        other = fractrainify(net, config=config.replace(pins=pins), example_inputs=(x,))
        errors[left] = (other(x) - plain).square().sum().item()
        net = other.restore()
    less = {name: errors[""] - errors[name] for name in ("1", "2")}
    for each in rounding:
        assert each.output_share == pytest.approx(less[each.name] / sum(less.values()), rel=1e-3)


@pytest.mark.parametrize("method", ["static", "fractrain", "float"])
def test_a_comparison_leaves_weights_gradients_buffers_modes_and_random_numbers_alone(method: Any) -> None:
    torch.manual_seed(0)
    subject = MODELS["vit"]
    model = rewritten(subject.build(), subject.batch, FracConfig(method=method))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.eval()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    modes, drawn = [each.training for each in model.modules()], torch.get_rng_state()
    found = compare(model, subject.batch, shares="estimated")
    assert torch.equal(torch.get_rng_state(), drawn)
    assert [each.training for each in model.modules()] == modes and not model.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters() if p.grad is not None)
    if method == "float":
        assert (found.output, found.gradient, found.findings) == (0, 0, ())


def test_the_table_fits_80_columns_and_plain_values_are_json() -> None:
    model, batch = pinned("transformer.h.1.mlp.c_fc", "FW-2/BW-8")
    found = compare(model, batch)
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 80
    assert any("first beyond a bound: transformer.h.1.mlp.c_fc" in line for line in lines)
    assert any("of gradient" in line or "share of" in line for line in lines)
    assert not any("…" in line.partition("transformer")[0] for line in lines if "%" in line and "differs" in line)
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["findings"][0]["op"] == "transformer.h.1.mlp.c_fc" and plain["shares"] == "switched"
    wide = Console(width=140, no_color=True)
    with wide.capture() as captured:
        wide.print(found)
    assert "transformer.h.1.mlp.c_fc" in captured.get()


def test_wrong_arguments_name_the_way_out() -> None:
    x = torch.randn(4, 16)
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    model = fractrainify(net, config=EIGHT, example_inputs=(x,))
    with pytest.raises(ConfigError, match="must be a positive number"):
        compare(model, x, bound=0)
    with pytest.raises(ConfigError, match="write 'switched' or 'estimated'"):
        compare(model, x, shares="guessed")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="made by fractrainify"):
        compare(net, x)
    with pytest.raises(InputError, match=r"targets of shape \(3,\): pass criterion"):
        compare(model, (x, torch.zeros(3, dtype=torch.int64)))
    with pytest.raises(InputError, match=r"must be \(inputs, targets\), not a Tensor"):
        compare(model, x, criterion=F.cross_entropy)


def test_a_criterion_gets_the_output_and_the_targets() -> None:
    x, y = torch.randn(4, 16), torch.arange(4)
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    model = fractrainify(net, config=EIGHT, example_inputs=(x,))
    usual = compare(model, (x, y))
    for inputs in (x, (x,), {"input": x}):
        found = compare(model, (inputs, y), criterion=F.cross_entropy)
        assert (found.loss, found.float_loss) == (usual.loss, usual.float_loss)
    smooth = compare(model, (x, y), criterion=partial(F.cross_entropy, label_smoothing=0.5))
    assert smooth.float_loss == pytest.approx(float(F.cross_entropy(net(x), y, label_smoothing=0.5)), rel=1e-5)
    told = examine(model, (x, y), F.cross_entropy)
    assert told is not None and "all values were finite" in told


def test_a_loss_that_is_not_finite_names_the_op_of_the_last_watched_step() -> None:
    torch.manual_seed(0)
    subject = MODELS["vit"]
    model = rewritten(subject.build(), subject.batch, EIGHT)
    engine = Engine(model)
    with torch.no_grad():
        model.get_parameter("blocks.1.norm2.weight")[0] = torch.inf
    with (
        watch(model),
        pytest.raises(NonFiniteLossError, match=r"In watched step 1, the input x of blocks\.1\.mlp\.fc1 in FW"),
    ):
        engine.loss(nn.functional.cross_entropy(model(subject.batch[0]), subject.batch[1])).backward()
        engine.end_epoch()


def test_a_step_run_again_names_the_op_also_among_those_that_stay_float() -> None:
    torch.manual_seed(0)
    subject = MODELS["resnet18"]
    model = rewritten(subject.build(), subject.batch, EIGHT)
    told = examine(model, subject.batch)
    assert told is not None and told.startswith("in this step, run again, all values were finite")
    with torch.no_grad():
        model.get_parameter("conv1.weight")[0, 0, 0, 0] = torch.nan
    assert "the output of conv1 in FW was first out: some values are NaN" in str(examine(model, subject.batch))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(torch.nan)
    assert "the weights are not finite any more" in str(examine(model, subject.batch))


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["timm:resnet10t", "--image-size", "32", "--method", "static", "--precision", "FW-8/BW-8"]
    assert main(["compare", *flags, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert {"ops", "findings", "operands", "loss"} <= plain.keys()


def test_sharded_and_packed_models_are_refused(tmp_path: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        x = torch.randn(4, 16)
        net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4))
        model = fully_shard(fractrainify(net, config=EIGHT, example_inputs=(x,)))
        with pytest.raises(ModelError, match="compare before fully_shard"):
            compare(model, x)
    finally:
        dist.destroy_process_group()
