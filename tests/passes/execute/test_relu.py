"""ReLUs in the copy that runs: the same numbers, and no mask in compiled graphs on a CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule
from torch.nn import functional as F

from fractrain_fx import FracModel, Precision
from fractrain_fx.execution.blocks.maskless_relu import MasklessReLU, relu
from tests import build


class Activations(nn.Module):
    """ReLUs of all kinds, with layers between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.plain, self.in_place = nn.ReLU(), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.plain(self.layers[0](x))
        x = self.in_place(self.layers[1](x))
        x = F.relu(self.layers[2](x))
        x = F.relu(self.layers[3](x), inplace=True)
        return torch.relu(self.layers[4](x))


def rewritten(model: nn.Module) -> FracModel:
    torch.manual_seed(0)
    return build.rewritten(model, torch.randn(2, 8), method="pfq")


def running(model: FracModel) -> GraphModule:
    return model._state.running[True].current()


def replaced(graph_module: GraphModule) -> int:
    functions = len(graph_module.graph.find_nodes(op="call_function", target=relu))
    called = [graph_module.get_submodule(str(n.target)) for n in graph_module.graph.find_nodes(op="call_module")]
    return functions + sum(isinstance(module, MasklessReLU) for module in called)


def test_every_relu_is_replaced_in_the_copy_alone() -> None:
    model = rewritten(Activations())
    assert replaced(running(model)) == 5
    assert replaced(model.graph_module) == 0
    assert model.state_dict().keys() == rewritten(Activations()).state_dict().keys()


def test_one_that_writes_where_others_read_stays() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.layers[1](self.layers[0](x))
            rows = hidden.view(-1)
            F.relu(rows, inplace=True)
            return self.layers[2](hidden)

    model = rewritten(Shared())
    assert replaced(running(model)) == 0
    x = torch.randn(3, 8)
    torch.testing.assert_close(model(x), model.graph_module(x)[0], rtol=0, atol=0)


def saved_by(function: Any, *given: Tensor) -> tuple[list[Tensor], list[torch.dtype]]:
    """Output and gradients of a compiled function, and the types of what its forward graph gives to backward."""
    kept: list[torch.dtype] = []

    def forward(graph_module: GraphModule, _: Any) -> Any:
        (output,) = graph_module.graph.find_nodes(op="output")
        kept.extend(node.meta["val"].dtype for node in output.args[0] if hasattr(node, "meta"))
        return make_boxed_func(graph_module.forward)

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph_module, _: make_boxed_func(graph_module.forward),
        partition_fn=min_cut_rematerialization_partition,  # these two are what inductor compiles with
        decompositions=select_decomp_table(),
    )
    given = tuple(each.clone().requires_grad_() for each in given)
    out = torch.compile(function, fullgraph=True, backend=backend)(*given)
    out.square().sum().backward()
    return [out.detach(), *(each.grad for each in given if each.grad is not None)], kept


@pytest.mark.long
@pytest.mark.parametrize("inplace", [False, True])
def test_a_compiled_one_keeps_no_mask_and_has_the_same_gradient(inplace: bool) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(2, 4, 8), torch.randn(8, 8)  # three dimensions, as the product then reads a view
    x[0, 0, :4] = torch.tensor([0.0, -0.0, 3.0, torch.nan])
    found, kept = saved_by(lambda x, w: relu(x * 2, inplace=inplace) @ w, x, w)
    wanted, masks = saved_by(lambda x, w: F.relu(x * 2, inplace=inplace) @ w, x, w)
    assert torch.bool in masks and torch.bool not in kept
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.long
def test_gradients_that_are_no_numbers_pass_where_torch_lets_them() -> None:
    x, g = torch.tensor([-1.0, 2.0, -1.0, 2.0]), torch.tensor([torch.inf, torch.inf, 1.0, 1.0])
    x.requires_grad_()
    torch.compile(relu, fullgraph=True, backend="aot_eager")(x).backward(g)
    assert x.grad is not None and x.grad.tolist() == [0, torch.inf, 0, 1]


@pytest.mark.long
def test_hooks_of_a_relu_are_heard_in_compiled_graphs_too() -> None:
    model = rewritten(Activations())
    heard = []
    model.get_submodule("plain").register_forward_hook(lambda *_: heard.append(1))
    torch.compile(model, backend="aot_eager")(torch.randn(2, 8))
    assert heard == [1]


@pytest.mark.long
def test_a_compiled_model_trains_with_the_gradients_of_eager_mode() -> None:
    model = rewritten(Activations())
    model.set_precision(Precision(32, 32))
    twin = copy.deepcopy(model)
    x = torch.randn(4, 8)
    model(x).square().sum().backward()
    torch.compile(twin, fullgraph=True, backend="aot_eager")(x).square().sum().backward()
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)
