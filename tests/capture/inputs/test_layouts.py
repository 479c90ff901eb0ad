"""Sparse and nested tensors, as arguments and as state: the graph is the model, and their products stay float."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fractrain_fx import FracConfig, fractrainify
from fractrain_fx.capture.compare import same_tensor
from fractrain_fx.errors import InputError
from fractrain_fx.passes import ops_of


class Graph(nn.Module):
    """Passes messages along the edges of a graph that it is given, or that it holds."""

    def __init__(self, edges: Tensor | None, buffer: bool = True) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        if buffer:
            self.register_buffer("edges", edges)
        else:
            self.edges = edges

    def forward(self, x: Tensor, edges: Tensor | None = None) -> Tensor:
        edges = self.edges if edges is None else edges
        assert edges is not None
        return self.last((edges @ self.middle(self.first(x))).relu())


class Texts(nn.Module):
    """Takes texts of several lengths as one nested tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, texts: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(texts)
        return self.last(self.middle(torch.nested.to_padded_tensor(h, 0.0)).relu()), h


def nested(*lengths: int, layout: torch.layout = torch.jagged) -> Tensor:
    return torch.nested.nested_tensor([torch.randn(length, 6) for length in lengths], layout=layout)


def edges(layout: str) -> Tensor:
    dense = (torch.rand(4, 4) > 0.5).float()
    return dense.to_sparse_csr() if layout == "csr" else dense.to_sparse()


Case = tuple[nn.Module, tuple[Any, ...]]
CASES: dict[str, Callable[[], Case]] = {
    "coo argument": lambda: (Graph(None), (torch.randn(4, 6), edges("coo"))),
    "csr argument": lambda: (Graph(None), (torch.randn(4, 6), edges("csr"))),
    "coo buffer": lambda: (Graph(edges("coo")), (torch.randn(4, 6),)),
    "csr buffer": lambda: (Graph(edges("csr")), (torch.randn(4, 6),)),
    "attribute": lambda: (Graph(edges("coo"), buffer=False), (torch.randn(4, 6),)),
    "nested argument": lambda: (Texts(), (nested(3, 5),)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_graph_is_the_model(case: str) -> None:
    model, call = CASES[case]()
    plain = copy.copy(model)  # torch does not copy buffers of the layout CSR
    plain._modules = copy.deepcopy(model._modules)
    rewritten = fractrainify(model, config=FracConfig(method="float"), example_inputs=call)
    for mode in (True, False):
        rewritten.train(mode)
        plain.train(mode)
        ours, theirs = ((out if isinstance(out, tuple) else (out,)) for out in (rewritten(*call), plain(*call)))
        assert all(map(same_tensor, ours, theirs))
        ours[0].sum().backward()
        theirs[0].sum().backward()
    for name, p in plain.named_parameters():
        gradient = rewritten.get_parameter(name).grad
        assert gradient is not None and p.grad is not None and torch.equal(gradient, p.grad)


@pytest.mark.parametrize("case", CASES)
def test_their_products_stay_float_and_say_so(case: str) -> None:
    model, call = CASES[case]()
    rewritten = fractrainify(model, config=FracConfig(method="pfq"), example_inputs=call)
    out = rewritten(*call)
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    apart = [op for _, op in ops_of(rewritten.graph) if op.precision.mode == "uncounted"]
    assert [op.precision.reason for op in apart] == [f"no formula for {apart[0].kind}"]
    assert apart[0].kind.startswith("nested" if case == "nested argument" else "sparse")
    assert any(op.precision.mode == "scheduled" for _, op in ops_of(rewritten.graph))


def test_texts_of_other_lengths_use_one_recording() -> None:
    model = Texts()
    rewritten = fractrainify(model, config=FracConfig(method="float"), example_inputs=(nested(3, 5),))
    for lengths in ((3, 5), (2, 7), (4, 4)):
        texts = nested(*lengths)
        assert all(map(same_tensor, rewritten(texts), model(texts)))


def test_nested_tensors_of_the_strided_layout_are_refused_with_a_way_out() -> None:
    with pytest.raises(InputError, match=r"'texts'.*layout=torch.jagged"):
        fractrainify(Texts(), example_inputs=(nested(3, 5, layout=torch.strided),))
