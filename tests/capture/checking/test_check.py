"""What counts as a difference between a model and its graph, and the memory that comparing needs."""

from __future__ import annotations

import weakref
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from fractrain_fx.capture import record
from fractrain_fx.capture.checking.check import find_mismatch, trials_of
from fractrain_fx.capture.checking.outcome import digest
from fractrain_fx.capture.compare import same_tensor
from fractrain_fx.capture.inputs.call import describe_call
from fractrain_fx.capture.state import Snapshot
from fractrain_fx.errors import CaptureError


class Unread(nn.Module):
    """Its second weight changes nothing, so that its gradient is 0, except for noise that is new in each run."""

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__()
        self.read, self.unread = nn.Parameter(torch.full((4,), 2.0)), nn.Parameter(torch.full((4,), 3.0))
        runs = count(1)
        self.unread.register_hook(lambda gradient: gradient + noise * next(runs))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.read + 0 * self.unread


def test_a_gradient_that_is_zero_but_for_rounding_is_no_difference() -> None:
    # As atomic additions on a GPU leave it: other digits in each run.
    assert record(Unread(1e-8), (torch.randn(2, 4),)).checked


def test_a_gradient_with_more_noise_than_rounding_is_a_difference() -> None:
    with pytest.raises(CaptureError, match="the gradient of unread differs"):
        record(Unread(1e-2), (torch.randn(2, 4),))


def test_a_wrong_gradient_is_named() -> None:
    model, x = Unread(), torch.randn(2, 4)
    recorded, snapshot = record(model, (x,)).train, Snapshot(model)
    (_, trial), _ = trials_of(snapshot, describe_call(model, (x,), {}), 0)
    assert find_mismatch(snapshot, recorded, trial) is None
    node = next(node for node in recorded.graph.nodes if "read" in str(node.target))
    with recorded.graph.inserting_after(node):
        cut = recorded.graph.call_method("detach", (node,))
    node.replace_all_uses_with(cut, delete_user_cb=lambda user: user is not cut)
    recorded.recompile()
    found = find_mismatch(snapshot, recorded, trial)
    assert found is not None
    assert found.names == ("read",)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])),
        (torch.tensor([NAN, 1.0]), -torch.tensor([NAN, 1.0])),
        (torch.tensor([INF, 1.0]), torch.tensor([-INF, 1.0])),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0 + 2.0**-22])),
        (torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 2.0]])),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0], dtype=torch.bfloat16)),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).conj().resolve_conj()),
        (torch.tensor(3), torch.tensor(3)),
        (torch.arange(6.0).view(2, 3).T, torch.arange(6.0).view(2, 3).T.contiguous()),
        (torch.eye(3).to_sparse(), torch.eye(3).to_sparse()),
        (torch.zeros(0, 3), torch.zeros(0, 3)),
    ],
    ids=str,
)
def test_digests_are_equal_exactly_if_the_tensors_are(a: Tensor, b: Tensor) -> None:
    assert (digest(a) == digest(b)) == same_tensor(a, b)


def test_a_digest_reads_all_chunks_of_a_tensor() -> None:
    a = torch.zeros(3, 2**20)
    for place in ((0, 0), (2, -1)):
        b = a.clone()
        b[place] = 5
        assert digest(a) != digest(b)
        assert digest(b).largest == 5


@pytest.mark.parametrize(("noise", "most"), [(0.0, 2), (1e-6, 6)], ids=["exact", "up to rounding"])
def test_gradients_are_compared_one_by_one_and_freed(noise: float, most: int) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(16)))
    alive: list[weakref.ref[Tensor]] = []
    counts, runs = [], count(1)

    def watch(gradient: Tensor) -> Tensor:
        gradient = gradient * (1 + noise * next(runs))
        alive[:] = [*(each for each in alive if each() is not None), weakref.ref(gradient)]
        counts.append(len(alive))
        return gradient

    for layer in range(len(model)):
        model.get_parameter(f"{layer}.weight").register_hook(watch)
    assert record(model, (torch.randn(2, 64),)).checked
    assert 1 <= max(counts) <= most, "of 16; with tolerance, a quarter of them is kept to be compared"


def test_sums_of_a_half_type_in_another_order_are_no_difference() -> None:
    """Beside the recorded number of samples, gradients of a bfloat16 LLaMA meet in another order in model and graph."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, num_hidden_layers=2, **sizes)).bfloat16()
    ids = torch.randint(64, (2, 16))
    recording = record(llama, (), {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    assert recording.checked and not recording.leaves
    x = torch.tensor([1.0, -0.5], dtype=torch.bfloat16)
    assert same_tensor(x, x * 1.01, 1e-4) and not same_tensor(x, x * 1.03, 1e-4) and not same_tensor(x, x * 1.01)
