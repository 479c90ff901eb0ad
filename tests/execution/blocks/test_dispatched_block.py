"""A dispatched block runs the samples that do not skip, gives the numbers of the masked form, and has its gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Tracer

from fractrain_fx.execution.blocks.dispatched_block import Adding, DispatchedBlock, rows_of, share_of
from fractrain_fx.formats import get_format
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.nn.gates import Skip
from fractrain_fx.nn.ranges import RunningRange


class Branch(nn.Module):
    """A layer with a range behind it, a norm and a skip select."""

    def __init__(self, axis: BatchAxis | None = None, *, norm: bool = False) -> None:
        super().__init__()
        self.layer, self.skip = nn.Linear(4, 4), Skip(axis or BatchAxis())
        self.range = RunningRange(get_format("affine"))
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.seen: list[int] = []
        self.layer.register_forward_hook(lambda module, args, out: self.seen.append(len(args[0])))

    def forward(self, choice: Tensor, x: Tensor) -> Tensor:
        y = self.layer(x)
        lo, span, _ = self.range(y)
        return self.skip(self.norm(y + 0 * (lo + span)), choice)


class _Whole(Tracer):
    """Does not look into the package's own modules."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def traced(module: nn.Module) -> GraphModule:
    return GraphModule(module, _Whole().trace(module))


def choice_of(*options: int, of: int = 3) -> Tensor:
    return nn.functional.one_hot(torch.tensor(options), of).float().requires_grad_()


def block_of(branch: Branch, adding: Adding = "new", threshold: float = 0.0) -> DispatchedBlock:
    graph = traced(branch)
    axis = branch.skip.batch
    return DispatchedBlock(graph, (BatchAxis(), axis), axis, adding, threshold)


def gradients(out: Tensor, *inputs: Tensor | nn.Parameter) -> list[Tensor | None]:
    return list(torch.autograd.grad(out.square().sum(), inputs, allow_unused=True))


@pytest.mark.parametrize("adding", ["new", "in place", "elsewhere"])
@pytest.mark.parametrize("options", [(1, 0, 2, 0, 0, 1), (0, 0, 0, 2, 0, 0), (1, 2, 1, 1, 1, 2), (0, 0, 0, 0, 0, 0)])
def test_outputs_and_gradients_are_those_of_the_masked_form(options: tuple[int, ...], adding: Adding) -> None:
    branch, choice = Branch(), choice_of(*options)
    block = block_of(branch, adding)
    onto, x = torch.randn(6, 5, 4, requires_grad=True), torch.randn(6, 5, 4, requires_grad=True)
    parameters = list(branch.parameters())
    expected = branch(choice, x) + (0 if adding == "elsewhere" else onto)
    branch.seen.clear()
    out = block(choice, onto, choice, x)
    torch.testing.assert_close(out, expected)
    reads = (x, *parameters) if adding == "elsewhere" else (onto, x, *parameters)
    for mine, masked in zip(gradients(out, *reads), gradients(expected, *reads), strict=True):
        assert mine is not None
        torch.testing.assert_close(mine, masked)
    runs = sum(option > 0 for option in options)
    # A block that was never run runs once without gradient to see what it gives.
    assert branch.seen == [runs or 6]


def test_a_choice_to_run_has_the_gradient_of_the_masked_form_and_a_choice_to_skip_has_none() -> None:
    branch, choice = Branch(), choice_of(1, 0, 2, 0)
    onto, x = torch.randn(4, 4), torch.randn(4, 4)
    (mine,) = gradients(block_of(branch)(choice, onto, choice, x), choice)
    (masked,) = gradients(branch(choice, x) + onto, choice)
    assert mine is not None and masked is not None and masked[1, 0] != 0
    torch.testing.assert_close(mine[[0, 2]], masked[[0, 2]])
    assert not mine[[1, 3]].any()


@pytest.mark.parametrize("axis", [BatchAxis(0, 3), BatchAxis(0, 3, major=False), BatchAxis(1), BatchAxis(1, 2)])
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0)])
def test_samples_are_found_wherever_they_lie(axis: BatchAxis, order: tuple[int, ...]) -> None:
    samples = 4
    shape = [3, 3, 4]
    shape[axis.axis] = samples * axis.factor
    stored = torch.randn([shape[each] for each in order])
    x = stored.permute([order.index(each) for each in range(3)])
    branch, choice = Branch(axis), choice_of(2, 0, 0, 1)
    out = block_of(branch)(choice, torch.zeros(shape), choice, x)
    torch.testing.assert_close(out, branch(choice, x))
    gathered = rows_of(x, axis, torch.tensor([0, 3]), samples)
    owner = axis.expand(torch.arange(samples), x.shape).flatten()
    assert torch.equal(gathered, x.index_select(axis.axis, ((owner == 0) | (owner == 3)).nonzero().flatten()))


def test_channels_last_stays() -> None:
    x = torch.randn(4, 6, 5, 5).contiguous(memory_format=torch.channels_last)
    assert rows_of(x, BatchAxis(), torch.tensor([1, 2]), 4).is_contiguous(memory_format=torch.channels_last)


def test_below_the_threshold_all_samples_run_and_the_bits_are_those_of_the_masked_form() -> None:
    branch, choice = Branch(), choice_of(1, 0, 2, 1)
    block = block_of(branch, threshold=0.3)
    onto, x = torch.randn(4, 4), torch.randn(4, 4)
    assert torch.equal(block(choice, onto, choice, x), onto + branch(choice, x))
    assert branch.seen == [4, 4]
    block.threshold.fill_(0.25)
    block(choice, onto, choice, x)
    assert branch.seen == [4, 4, 3]


def test_a_block_that_nobody_runs_gives_zero_gradients_and_holds_no_activation() -> None:
    branch, choice = Branch(), choice_of(0, 0)
    block = block_of(branch)
    onto, x = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    block(choice, onto, choice, x)
    branch.seen.clear()
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = block(choice, onto, choice, x)
    assert torch.equal(out, onto) and out is not onto and not branch.seen and not kept
    out.sum().backward()
    for each in (branch.layer.weight, branch.layer.bias, choice, x):
        assert each.grad is not None and not each.grad.any()
    assert onto.grad is not None and (onto.grad == 1).all()


def test_one_in_ten_is_a_tenth() -> None:
    branch, choice = Branch(), choice_of(0, *[1] * 9)
    x = torch.randn(10, 4)
    block_of(branch, threshold=0.1)(choice, x, choice, x)
    assert branch.seen == [9]


def test_a_frozen_parameter_gets_no_gradient() -> None:
    branch, choice = Branch(), choice_of(0, 0)
    branch.layer.weight.requires_grad_(False)
    x = torch.randn(2, 4)
    block_of(branch)(choice, x, choice, x).sum().backward()
    assert branch.layer.weight.grad is None and branch.layer.bias.grad is not None


@pytest.mark.parametrize("mode", ["training", "calibrating"])
def test_ranges_of_a_block_that_nobody_runs_are_seen_once(mode: str) -> None:
    branch, choice = Branch(), choice_of(0, 0)
    block = block_of(branch).train(mode == "training")
    x = torch.randn(2, 4)
    before = torch.random.get_rng_state()
    for _ in range(3):
        block(choice, x, choice, x)
    assert branch.range.seen and len(branch.seen) == 1
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("options", [(1, 0, 2), (0, 0, 0), (1, 1, 1)])
@pytest.mark.parametrize("adding", ["new", "in place", "elsewhere"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_the_type_is_that_of_the_masked_form(
    options: tuple[int, ...], adding: Adding, dtype: torch.dtype
) -> None:
    branch, choice = Branch(), choice_of(*options)
    block, masked = block_of(branch, adding), block_of(copy.deepcopy(branch), adding, threshold=2.0)
    onto, x = torch.randn(3, 4, dtype=dtype), torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = block(choice, onto, choice, x), masked(choice, onto, choice, x)
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected)


def test_batch_norm_gets_two_samples_even_if_one_runs() -> None:
    branch, choice = Branch(norm=True), choice_of(0, 1, 0, 0)
    x, onto = torch.randn(4, 4), torch.randn(4, 4)
    out = block_of(branch)(choice, onto, choice, x)
    assert branch.seen == [2] and out.isfinite().all()
    assert torch.equal(out[[0, 2, 3]], onto[[0, 2, 3]])
    branch.eval()
    block_of(branch).eval()(choice, onto, choice, x)
    assert branch.seen == [2, 1]


@pytest.mark.parametrize("samples", [0, 1])
def test_batches_of_one_and_none(samples: int) -> None:
    branch, choice = Branch(), choice_of(*[0] * samples) if samples else torch.zeros(0, 3)
    x = torch.randn(samples, 4)
    assert torch.equal(block_of(branch)(choice, x, choice, x), x)


def test_a_row_that_stands_for_all_samples_lets_all_run() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.skip = Skip(BatchAxis())

        def forward(self, choice: Tensor, x: Tensor, bias: Tensor) -> Tensor:
            return self.skip(x + bias, choice)

    module, choice = Adds(), choice_of(0, 1, 0)
    block = DispatchedBlock(traced(module), [BatchAxis()] * 3, BatchAxis(), "new", 0.0)
    x = torch.randn(3, 4)
    torch.testing.assert_close(block(choice, x, choice, x, x[:1]), x + module(choice, x, x[:1]))


def test_numbers_in_proportion_to_the_samples_shrink_with_them() -> None:
    assert share_of(24, 2, 6) == 8

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.skip = Skip(BatchAxis())

        def forward(self, choice: Tensor, x: Tensor, samples: int, width: Any) -> Tensor:
            return self.skip(x.view(samples, -1, width).flatten(1), choice)

    module, choice = Views(), choice_of(0, 1, 0)
    block = DispatchedBlock(traced(module), [BatchAxis(), BatchAxis(), "count", None], BatchAxis(), "new", 0.0)
    x = torch.randn(3, 4)
    torch.testing.assert_close(block(choice, x, choice, x, 3, 2), x + module(choice, x, 3, 2))


def test_names_of_parameters_and_state_stay_with_the_model() -> None:
    block = block_of(Branch())
    assert not list(block.parameters()) and not block.state_dict() and not list(block.children())
    assert [name for name, _ in block.named_buffers()] == ["threshold"]


def test_compiled_all_samples_run_without_a_graph_break() -> None:
    branch, choice = Branch(), choice_of(0, 1, 0, 0)
    branch.layer._forward_hooks.clear()
    block = block_of(branch)
    x = torch.randn(4, 4)
    compiled = torch.compile(block, fullgraph=True, backend="eager")
    assert torch.equal(compiled(choice, x, choice, x), x + branch(choice, x))
