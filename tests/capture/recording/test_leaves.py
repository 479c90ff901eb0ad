"""What stays one node, and why: norms and the like, and modules that a graph cannot hold."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fractrain_fx.capture import Recording, record
from fractrain_fx.errors import CaptureError, InputError


def kinds(recording: Recording) -> set[str]:
    modules = recording.train
    return {type(modules.get_submodule(str(n.target))).__name__ for n in modules.graph.nodes if n.op == "call_module"}


def calls(recording: Recording) -> list[str]:
    return [
        str(getattr(n.target, "__name__", n.target))
        for n in recording.train.graph.nodes
        if n.op in ("call_function", "call_method")
    ]


def test_norms_activations_pooling_and_dropout_are_nodes_and_convolutions_are_not() -> None:
    recording = record(timm.create_model("test_efficientnet"), (torch.randn(2, 3, 32, 32),))
    assert {"BatchNormAct2d", "SiLU", "Sigmoid"} <= kinds(recording)
    assert not {"Conv2d", "Linear"} & kinds(recording)


def test_a_module_named_norm_that_holds_a_contraction_is_looked_into() -> None:
    class PreNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mix = nn.LayerNorm(4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.mix(self.norm(x))

    recording = record(nn.Sequential(PreNorm()), (torch.randn(2, 4),))
    assert kinds(recording) == {"LayerNorm"}
    assert calls(recording) == ["linear"]


def test_a_module_without_weights_is_looked_into_only_for_a_trained_contraction() -> None:
    class Mix(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ x.transpose(-1, -2)

    class Table(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            steps = torch.arange(x.shape[1], dtype=torch.float32, device=x.device)
            return x + (steps[:, None] @ steps[None]).diagonal().sin()

    recording = record(nn.Sequential(nn.Linear(4, 4), Table(), Mix()), (torch.randn(2, 4),))
    assert kinds(recording) == {"Table"}
    assert calls(recording) == ["linear", "transpose", "matmul"]


def test_a_module_that_adds_to_a_list_it_is_given_is_looked_into() -> None:
    class Pool(nn.Module):
        def forward(self, levels: list[Tensor]) -> list[Tensor]:
            levels.append(levels[-1].mean(1))
            return levels

    class Pyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.pool = nn.Linear(4, 4), Pool()

        def forward(self, x: Tensor) -> list[Tensor]:
            return self.pool([self.mix(x)])

    recording = record(Pyramid(), (torch.randn(2, 4),))
    assert not recording.leaves
    assert calls(recording) == ["linear", "mean"]


def test_an_identity_does_not_re_route_the_skip_path() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.drop = nn.Linear(4, 4), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.mix(self.drop(x)) + x

    graph = record(Skip(), (torch.randn(2, 4),)).train.graph
    (add,) = [n for n in graph.nodes if getattr(n.target, "__name__", "") == "add"]
    assert add.args[1].op == "placeholder"


class Routed(nn.Module):
    """Each sample goes to the expert that its values choose."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (x.sum(1) > 0).long() == i
            if rows.any():
                out[rows] = expert(x[rows])
        return out


def test_a_data_dependent_module_is_kept_whole_with_its_reason() -> None:
    recording = record(nn.Sequential(nn.Linear(4, 4), Routed(), nn.Linear(4, 2)), (torch.randn(4, 4),))
    assert list(recording.leaves) == ["1"]
    assert "depends on values" in recording.leaves["1"]
    assert calls(recording) == ["linear", "linear"]


class Held:
    """An object of the user's own, in which nobody looks for tensors."""

    def __init__(self, images: Tensor) -> None:
        self.images = images


class Prepare(nn.Module):
    """Puts a list of images into one object; with ``by_value`` in a way that values decide."""

    def __init__(self, by_value: bool) -> None:
        super().__init__()
        self.by_value = by_value

    def forward(self, images: list[Tensor]) -> Held:
        x = torch.stack(images)
        return Held(x / 255 if self.by_value and x.max() > 1 else 2 * x)


class Detector(nn.Module):
    def __init__(self, by_value: bool) -> None:
        super().__init__()
        self.prepare, self.conv = Prepare(by_value), nn.Conv2d(3, 4, 3)

    def forward(self, images: list[Tensor]) -> Tensor:
        return self.conv(self.prepare(images).images)


def test_tensors_in_an_object_are_followed_or_the_module_that_returns_it_is_named() -> None:
    def images() -> list[Tensor]:
        return [torch.rand(3, 8, 8), torch.rand(3, 8, 8)]

    model, others = Detector(by_value=False), images()
    assert torch.equal(record(model, (images(),)).train.forward(others), model(others))
    with pytest.raises(CaptureError, match="'prepare' stays one node and returns a Held"):
        record(Detector(by_value=True), (images(),))


def test_a_data_dependent_model_is_refused_with_a_way_out() -> None:
    with pytest.raises(CaptureError, match=r"Routed itself .* submodule of its own"):
        record(Routed(), (torch.randn(4, 4),))


def test_a_model_that_is_no_graph_is_told_which_part_of_it_is_one() -> None:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Sequential(Routed(), nn.Linear(4, 400))
            self.backbone = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            x = self.head(self.backbone(x))
            return x if x.sum() > 0 else -x

    way_out = r"rewrite its largest part alone: model.backbone = fractrainify\(model.backbone, example_inputs"
    with pytest.raises(CaptureError, match=way_out):
        record(Detector(), (torch.randn(4, 4),))


def test_a_loop_over_samples_is_kept_whole_because_the_check_runs_more_samples() -> None:
    class Loop(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([row * math.sqrt(i + 1) for i, row in enumerate(x)])

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.loop = nn.Parameter(torch.randn(4, 4)), Loop()
            self.loop.gain = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.loop(x), self.weight)

    recording = record(nn.Sequential(Holder()), (torch.randn(2, 4),))
    assert list(recording.leaves) == ["0.loop"]
    assert "more samples" in recording.leaves["0.loop"]


def test_hooks_keep_working_and_a_hooked_module_is_kept_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    seen: list[torch.Size] = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    recording = record(model, (torch.randn(2, 4),))
    seen.clear()
    recording.train(torch.randn(5, 4))
    assert seen == [(5, 4)]
    assert "forward hook" in recording.leaves["0"]


def test_checks_that_only_raise_stay_as_assertions() -> None:
    class Guarded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if x.max() > 100:
                raise ValueError("too large")
            y = self.linear(x)
            if torch.isinf(y).any():
                y = y.clamp(-1, 1)
            return y

    recording = record(Guarded(), (torch.randn(2, 4),))
    assert calls(recording).count("_require_as_recorded") == 2
    with pytest.raises(InputError, match="a test of values"):
        recording.train(torch.full((2, 4), 1000.0))


def test_a_branch_that_runs_into_a_false_assertion_of_torch_only_raises() -> None:
    class Boxes(nn.Module):
        """Tests its boxes as torchvision's detectors do."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            degenerate = x[:, 2:] <= x[:, :2]
            if degenerate.any():
                first = torch.where(degenerate.any(dim=1))[0][0]
                torch._assert(False, f"box {x[first].tolist()} has no area")
            return self.linear(x)

    boxes = torch.tensor([[0.0, 0.0, 1.0, 2.0], [1.0, 1.0, 3.0, 2.0]])
    recording = record(Boxes(), (boxes,))
    assert calls(recording).count("_require_as_recorded") == 1 and not recording.leaves
    with pytest.raises(InputError, match="a test of values"):
        recording.train(-boxes)


def test_custom_autograd_functions_are_one_node_with_their_own_gradient() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 7

    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return Double.apply(self.linear(x))

    recording = record(Doubled(), (torch.randn(2, 4),))
    assert calls(recording) == ["linear", "Double"]


def test_checkpointed_parts_are_looked_into() -> None:
    class Checkpointed(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.first, self.second, self.reentrant = nn.Linear(4, 4), nn.Linear(4, 4), reentrant

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.second, self.first(x), use_reentrant=self.reentrant)

    for reentrant in (False, True):
        assert calls(record(Checkpointed(reentrant), (torch.randn(2, 4),))).count("linear") == 2


def test_a_recording_follows_its_inputs_to_another_device() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + torch.arange(x.shape[1], device=x.device)

    recording = record(Positions(), (torch.randn(2, 4),))
    moved = copy.deepcopy(recording.train).to("meta")
    assert moved(torch.empty(3, 4, device="meta")).shape == (3, 4)
