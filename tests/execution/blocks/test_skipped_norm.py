"""A batch norm and the skip behind it as one op against the two modules."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx.execution.blocks.original import Original
from fractrain_fx.execution.blocks.skipped_norm import SkippedNorm
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.nn.gates import Skip

Norm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
SHAPES = {"1d": (6, 4), "sequence": (6, 4, 5), "2d": (6, 4, 5, 3), "3d": (6, 4, 2, 3, 2)}
NORMS: dict[str, type[Norm]] = {
    "1d": nn.BatchNorm1d,
    "sequence": nn.BatchNorm1d,
    "2d": nn.BatchNorm2d,
    "3d": nn.BatchNorm3d,
}


def made(kind: str, **options: object) -> Norm:
    norm = NORMS[kind](4, **options)  # type: ignore[arg-type]
    if norm.affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    if norm.running_mean is not None and norm.running_var is not None:
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    return norm


def run(norm: nn.Module, x: Tensor, choice: Tensor, *, fused: bool) -> dict[str, Tensor]:
    norm, skip = copy.deepcopy(norm), Skip(BatchAxis())
    x, choice = x.clone().requires_grad_(), choice.clone().requires_grad_()
    out = SkippedNorm(Original({"bn": norm}, "bn"), skip)(x, choice) if fused else skip(norm(x), choice)
    out.square().sum().backward()
    parameters = {name: p.grad for name, p in norm.named_parameters()}
    return {"out": out.detach(), "x": x.grad, "choice": choice.grad, **parameters, **dict(norm.named_buffers())}


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}], ids=str)
@pytest.mark.parametrize("chosen", [(0, 1, 2, 0, 1, 1), (1, 2, 2, 1, 1, 1)], ids=["some-skip", "none-skips"])
def test_gives_the_numbers_of_the_two_modules(
    kind: str, training: bool, options: dict[str, bool], chosen: tuple[int, ...]
) -> None:
    norm, x = made(kind, **options).train(training), torch.randn(SHAPES[kind])
    choice = nn.functional.one_hot(torch.tensor(chosen), 3).float()
    shown, run_ = run(norm, x, choice, fused=False), run(norm, x, choice, fused=True)
    assert shown.keys() == run_.keys() and shown["choice"].any()
    for name in shown:
        if name == "choice":  # the same sum in another order
            torch.testing.assert_close(run_[name], shown[name], rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(run_[name], shown[name]), name


@pytest.mark.parametrize(("kind", "shape"), [("1d", (1, 4)), ("sequence", (1, 4, 1)), ("2d", (1, 4, 1, 1))])
def test_one_value_for_each_channel_is_refused_in_training_as_the_norm_refuses_it(
    kind: str, shape: tuple[int, ...]
) -> None:
    norm, x, choice = made(kind), torch.randn(shape), torch.tensor([[0.0, 1.0, 0.0]])
    alone = copy.deepcopy(norm)
    fused = SkippedNorm(Original({"bn": norm}, "bn"), Skip(BatchAxis()))
    for run in (lambda: alone(x), lambda: fused(x, choice)):
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            run()
    assert all(map(torch.equal, norm.buffers(), alone.buffers())) and norm.get_buffer("running_var").isfinite().all()
    norm.eval()
    assert torch.equal(fused(x, choice), alone.eval()(x))


def test_averages_that_were_switched_off_stay_as_they_are() -> None:
    norm, x = made("2d"), torch.randn(SHAPES["2d"])
    norm.track_running_stats = False
    choice = nn.functional.one_hot(torch.tensor((0, 1, 2, 0, 1, 1)), 3).float()
    shown, run_ = run(norm, x, choice, fused=False), run(norm, x, choice, fused=True)
    assert all(torch.equal(run_[name], shown[name]) for name in shown)


def test_half_types_and_running_averages_that_move_on_before_backward() -> None:
    norm = made("2d").bfloat16().eval()
    x, choice = torch.randn(3, 4, 2, 2).bfloat16(), torch.eye(3).bfloat16()
    inputs = [each.clone().requires_grad_() for each in (x, choice)]
    out = SkippedNorm(Original({"bn": norm}, "bn"), Skip(BatchAxis()))(*inputs)
    y = norm(x).float()
    norm.get_buffer("running_var").mul_(9)
    out.sum().backward()
    assert out.dtype == torch.bfloat16 and inputs[1].grad is not None
    # A gradient in bfloat16 holds three digits.
    torch.testing.assert_close(inputs[1].grad[:, 0].float(), -y.sum((1, 2, 3)), rtol=2e-2, atol=2e-2)


def test_another_module_in_the_norms_place_runs_as_it_is() -> None:
    class Doubled(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    block = nn.Sequential(made("2d"))
    fused = SkippedNorm(Original({"block": block}, "block.0"), Skip(BatchAxis()))
    x, choice = torch.randn(2, 4, 3, 3), torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    before = fused(x, choice)
    block[0] = Doubled(4)
    block[0].load_state_dict(block[0].state_dict())
    assert not torch.equal(fused(x, choice), before)
    seen: list[Tensor] = []
    block[0] = plain = made("2d")
    plain.register_forward_hook(lambda module, args, output: seen.append(output))
    fused(x, choice)
    assert len(seen) == 1, "a hook on the norm is called"
