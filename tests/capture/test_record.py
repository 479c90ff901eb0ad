"""A recorded graph equals its model: ``record`` compares the two itself, and raises where they differ."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from fractrain_fx.capture import Recording, record, resize_batch
from fractrain_fx.errors import CaptureError, InputError
from fractrain_fx.zoo.models import resnet20
from tests.build import rewritten
from tests.capture.conftest import Call, huggingface_call, images, timm_call, tokens
from tests.models import thinned

TIMM: dict[str, tuple[int, dict[str, Any]]] = {
    "resnet18": (64, {}),
    "resnet50": (32, {"layers": (2, 1, 1, 1), "drop_path_rate": 0.1}),
    "mobilenetv2_100": (32, {"drop_path_rate": 0.1}),
    "efficientnet_b0": (32, {"drop_path_rate": 0.1}),
    "vit_tiny_patch16_224": (32, {"img_size": 32, "depth": 2, "drop_path_rate": 0.1, "attn_drop_rate": 0.1}),
    "swin_tiny_patch4_window7_224": (56, {"img_size": 56, "depths": (2, 2), "num_heads": (3, 6), "window_size": 7}),
    "convnext_atto": (64, {"depths": (1, 1, 2, 1), "drop_path_rate": 0.1}),
    "densenet121": (32, {"block_config": (3, 3, 3, 3)}),
    "test_nfnet": (32, {}),
    "levit_128s": (64, {"img_size": 64, "depth": (1, 1, 1)}),
}
HUGGING_FACE = ["bert", "gpt2", "llama", "t5", "vit", "mixtral", "mixtral with a loop over experts"]


def own(recording: Recording) -> list[str]:
    """Names of functions and methods called, without what leaves do."""
    calls = [n for n in recording.train.graph.nodes if n.op in ("call_function", "call_method")]
    return [str(getattr(n.target, "__name__", n.target)) for n in calls]


def recorded(call: Call) -> Recording:
    recording = record(*call)
    assert recording.checked and not recording.fixed_batch
    recording.train.graph.lint()
    assert "def forward" in recording.train.print_readable(print_output=False)
    return recording


@pytest.mark.parametrize("name", thinned(TIMM, 3))
def test_timm_models_equal_their_graph_and_one_graph_serves_both_modes(name: str) -> None:
    size, options = TIMM[name]
    recording = recorded(timm_call(name, size, **options))
    assert recording.train is recording.eval
    assert not recording.leaves


@pytest.mark.parametrize("name", thinned(HUGGING_FACE, 3))
def test_hugging_face_models_equal_their_graph_on_padded_batches(name: str) -> None:
    recording = recorded(huggingface_call(name))
    assert recording.train is recording.eval
    assert set(recording.leaves) == (
        {f"model.layers.{i}.mlp.experts" for i in (0, 1)} if name == "mixtral with a loop over experts" else set()
    )


def test_torchvision_resnet() -> None:
    recorded((torchvision.models.resnet18(), (images(32),), {}))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(4, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.wide(x) if x.shape[1] > 4 else self.narrow(x)
        return {"logits": y, "mean": y.mean()}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True, **options)

    def forward(self, x: Tensor, padding: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.attention(x, x, x, key_padding_mask=padding)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out, (hidden, _) = self.lstm(x)
        return self.head(out[:, -1] + hidden[-1])


def padding() -> Tensor:
    return torch.tensor([[False, False, True], [False, True, True]])


SMALL: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
    "sequential": (
        nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True), nn.Flatten(), nn.Dropout(), nn.Linear(144, 5)
        ),
        (images(8),),
    ),
    "shape branch and dict": (Branching(), (torch.randn(2, 8),)),
    "tied": (Tied(), (torch.randint(11, (2, 5)),)),
    "attention": (Attention(), (torch.randn(2, 3, 8), padding())),
    "attention with bias": (Attention(add_bias_kv=True, kdim=8, vdim=8), (torch.randn(2, 3, 8), padding())),
    "encoder": (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
        (torch.randn(2, 3, 8), None, padding()),
    ),
    "lstm": (Recurrent(), (torch.randn(2, 5, 4),)),
    "weight norm": (nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (torch.randn(2, 4),)),
    "spectral norm": (nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 3))), (torch.randn(2, 4),)),
}


@pytest.mark.parametrize("name", SMALL)
def test_small_models(name: str) -> None:
    model, args = SMALL[name]
    recorded((model, args, {}))


def test_attention_is_recorded_through_its_plain_path() -> None:
    calls = own(recorded((SMALL["encoder"][0], SMALL["encoder"][1], {})))
    assert calls.count("linear") == 2 * 4
    assert calls.count("scaled_dot_product_attention") == 2


def test_weights_keep_their_objects_names_and_ties() -> None:
    model = Tied()
    recording = record(model, (torch.randint(11, (2, 5)),))
    assert list(recording.train.state_dict()) == list(model.state_dict())
    assert recording.train.get_parameter("head.weight") is model.embed.weight
    duplicate = copy.deepcopy(recording.train)
    assert list(duplicate.state_dict()) == list(model.state_dict())
    assert duplicate.get_parameter("head.weight") is duplicate.get_parameter("embed.weight") is not model.embed.weight
    assert type(duplicate.unused) is nn.Linear


def test_a_copy_runs_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    x = torch.randn(2, 4)
    recording = record(model, (x,))
    before = model(x)
    duplicate = copy.deepcopy(recording.train)
    nn.init.zeros_(model.get_parameter("0.weight"))
    assert torch.equal(duplicate(x), before)
    assert not torch.equal(recording.train(x), before)


@pytest.mark.parametrize("name", thinned(["convolutions", "vit", "llama"], 3))
def test_recorded_graphs_compile_without_a_break_in_train_mode(name: str) -> None:
    calls = {
        # Without its dropout, whose random numbers a compiler may draw in another way.
        "convolutions": lambda: (
            nn.Sequential(*(m for m in SMALL["sequential"][0].children() if type(m) is not nn.Dropout)),
            (images(8),),
            {},
        ),
        "vit": lambda: timm_call("vit_tiny_patch16_224", 32, img_size=32, depth=1),
        "llama": lambda: huggingface_call("llama"),
    }
    model, args, kwargs = calls[name]()
    recording = record(model, args, kwargs)
    inputs = recording.call.bind(args, kwargs)
    recording.train.train()
    compiled = torch.compile(recording.train, fullgraph=True, backend="aot_eager")
    expected, actual = recording.train(*inputs), compiled(*inputs)
    first = [x if isinstance(x, Tensor) else x["logits"] for x in (expected, actual)]
    torch.testing.assert_close(*first)


def test_recording_leaves_no_trace_on_the_model() -> None:
    model, args, _ = timm_call("levit_128s", 64, img_size=64, depth=(1, 1, 1))
    model.train()
    model.get_submodule("head").eval()
    for parameter in list(model.parameters())[:3]:
        parameter.grad = torch.ones_like(parameter)
    state = {name: x.clone() for name, x in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    attributes = [set(vars(module)) for module in model.modules()]
    grads = [parameter.grad for parameter in model.parameters()]
    random = torch.get_rng_state()
    call = nn.Module.__call__
    record(model, args)
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert all(a is b for a, b in zip(grads, (p.grad for p in model.parameters()), strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    assert nn.Module.__call__ is call
    assert not any(hasattr(module, "frac") for module in model.modules())


def test_nothing_stays_patched_after_an_error() -> None:
    patched = [(nn.Module, "__call__"), (torch.autocast, "__enter__"), (torch.cuda, "is_current_stream_capturing")]
    before = [getattr(owner, name) for owner, name in patched] + [len, torch.backends.mha.get_fastpath_enabled()]
    with pytest.raises(InputError, match="rejects the example inputs"):
        record(nn.Linear(4, 2), (torch.randn(2, 5),))
    after = [getattr(owner, name) for owner, name in patched] + [len, torch.backends.mha.get_fastpath_enabled()]
    assert before == after


def test_without_data_nothing_is_checked_and_the_recording_says_so() -> None:
    with torch.device("meta"):
        recording = record(timm_call("resnet18", 32)[0], (torch.randn(2, 3, 32, 32),))
    assert not recording.checked
    assert own(recording).count("conv2d") == 20


class Made(NamedTuple):
    first: Tensor
    rest: list[Tensor]


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, parts: dict[str, list[Tensor]], *more: Tensor, scale: float = 1.0) -> Made:
        total = self.linear(parts["a"][0]) + parts["a"][1] * scale
        return Made(total, [total.sum(1), *more])


def test_nested_inputs_and_outputs_keep_their_structure() -> None:
    def call() -> tuple[dict[str, list[Tensor]], Tensor]:
        return {"a": [torch.randn(2, 4), torch.randn(2, 4)]}, torch.randn(2, 3)

    model = Structured()
    recording = record(model, call(), {"scale": 0.5})
    assert recording.call.placeholders == ("parts", "more_0")
    parts, more = call()
    out = recording.train(*recording.call.bind((parts, more), {"scale": 0.5}))
    assert isinstance(out, Made)
    assert torch.equal(out.first, model(parts, more, scale=0.5).first)


def test_a_pyramid_of_features_keeps_keys_that_are_no_names() -> None:
    class Levels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> OrderedDict[str, Tensor]:
            return OrderedDict([("0", x := self.one(x)), ("class", self.two(x))])

    recording = record(Levels(), (torch.randn(2, 4),))
    out = recording.train(torch.randn(3, 4))
    assert isinstance(out, OrderedDict)
    assert {key: x.shape for key, x in out.items()} == {"0": (3, 4), "class": (3, 2)}


def test_dropout_follows_the_mode_through_a_switch() -> None:
    model, args, kwargs = timm_call("vit_tiny_patch16_224", 32, img_size=32, depth=1, attn_drop_rate=0.3)
    recording = record(model, args, kwargs)
    switches = [n for n in recording.train.graph.nodes if str(n.target).startswith("frac.mode.")]
    assert len(switches) == 1
    switch: Any = recording.train.get_submodule(str(switches[0].target))
    assert (switch.train_value, switch.eval_value) == (0.3, 0.0)
    assert switch.training == model.training


class OnlyInTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * 2 if self.training else self.linear(x)


def test_modes_of_different_structure_get_two_graphs_on_the_same_modules() -> None:
    recording = recorded((OnlyInTraining(), (torch.randn(2, 4),), {}))
    assert recording.train is not recording.eval
    assert recording.train._modules is recording.eval._modules


def test_gradients_stop_where_the_model_stops_them() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below, self.above = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                y = self.below(x).relu()
            return self.above(y)

    model = Frozen()
    recording = recorded((model, (torch.randn(2, 4),), {}))
    recording.train(torch.randn(2, 4)).sum().backward()
    assert model.below.weight.grad is None
    assert model.above.weight.grad is not None


def test_an_autocast_region_keeps_its_precision() -> None:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                y = x.float() @ x.float().T
            return self.linear(x) + y.sum()

    model, x = Careful(), torch.randn(2, 4)
    recording = recorded((model, (x,), {}))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(recording.train(x), model(x))


def test_a_name_that_insertions_need_is_refused() -> None:
    model = nn.Sequential()
    model.add_module("frac", nn.Linear(2, 2))
    with pytest.raises(CaptureError, match="rename it"):
        record(model, (torch.randn(2, 2),))


def test_masks_are_right_for_padding_that_the_example_did_not_have() -> None:
    model, args, kwargs = huggingface_call("bert")
    full = kwargs | {"attention_mask": torch.ones_like(kwargs["attention_mask"])}
    recording = record(model, args, full)
    model.eval()
    recording.eval.eval()
    other = tokens()
    # Rounding only: without padding in its example the model itself takes another attention kernel.
    torch.testing.assert_close(recording.eval(*recording.call.bind((), other)).logits, model(**other).logits)


def test_more_samples_come_from_the_first_ones() -> None:
    inputs = {"x": torch.tensor([1, 2]), "table": torch.zeros(5, 3)}
    grown = resize_batch((torch.zeros(2, 1), inputs), 3)
    assert grown[1]["x"].tolist() == [1, 2, 1]
    assert grown[1]["table"].shape == (5, 3)


class UnusedBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.side, self.head = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        F.dropout(self.side(x), 0.5, self.training)
        return self.head(x + self.body(x))


def test_a_branch_without_use_is_in_the_one_graph_of_both_modes() -> None:
    recording = record(UnusedBranch(), (torch.randn(2, 4),))
    assert recording.graphs == (recording.train,)


def test_a_node_names_the_line_of_a_model_and_none_for_models_of_torchs_modules_alone() -> None:
    def lines(model: nn.Module, x: Tensor) -> set[str | None]:
        nodes = rewritten(model, x, method="pfq", check=True).graph.nodes
        return {node.meta["source"] for node in nodes if "source" in node.meta and node.op != "placeholder"}

    assert lines(nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))), torch.randn(2, 6)) == {None}
    assert any("zoo/models" in str(line) for line in lines(resnet20(), torch.randn(2, 3, 8, 8)))


class Answers(dict):  # type: ignore[type-arg]
    """A configuration as many projects have it: what it lacks is a ``KeyError``."""

    __getattr__ = dict.__getitem__


SETTINGS: Any = Answers(scale=2.0)


def _looped(x: Tensor) -> Tensor:
    while bool(x.abs().max() > SETTINGS.scale):
        x = x / 2
    return x


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, settings: Any) -> Tensor:
        return self.linear(x) * settings.scale + _looped(x.detach())


def test_configurations_that_answer_with_a_key_error_are_left_in_peace() -> None:
    model = Configured()
    recording = record(model, (torch.full((2, 4), 9.0), SETTINGS))
    x = torch.full((3, 4), 40.0)
    assert torch.equal(recording.train(x), model(x, SETTINGS))
