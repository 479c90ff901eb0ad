"""What a forward does outside torch: attributes it reads and changes, Python's and numpy's random numbers."""

from __future__ import annotations

import array
import copy
import functools
import random
import warnings
from collections import deque, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fractrain_fx.capture import Recording, record
from fractrain_fx.capture.state import LEVELS, preserved_random_state, set_level
from fractrain_fx.errors import CaptureError
from tests.capture.conftest import Call, huggingface_call, timm_call

X = torch.randn(3, 4)


class Body(nn.Module):
    """Reads plain attributes; ``step`` is what each test gives it to do besides."""

    def __init__(self) -> None:
        super().__init__()
        self.tau, self.warm, self.p, self.n = 2.0, True, 0.5, 0
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.up(x) / self.tau, self.p, self.training)
        return self.down(h.relu() if self.warm else h)


class Counts(Body):
    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return super().forward(x)


class WarmsUp(Body):
    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return super().forward(x) * min(1.0, self.n / 1000)


class Remembers(Body):
    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y = y if self.last is None else y + self.last
        self.last = y.detach()[:1]
        return y


class Caches(Body):
    length: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.length != x.shape[1]:
            self.length = int(x.shape[1])
            self.table = torch.arange(4.0)
        return super().forward(x) * self.table


class LeavesALoss(Body):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.balance = y.square().mean()
        return y


class LeavesItIn(Body):
    """Puts a loss into a container, or an object's container, for code around it, and a table there once."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.losses: Any = {"list": [], "dict": {}, "deque": deque(maxlen=4), "object": SimpleNamespace(losses=[])}[
            place
        ]
        self.table: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if x.shape[-1] not in self.table:
            self.table[x.shape[-1]] = torch.arange(x.shape[-1]) / 7
        if isinstance(self.losses, dict):
            self.losses["balance"] = y.square().mean()
        else:
            getattr(self.losses, "losses", self.losses).append(y.square().mean())
        return y + self.table[x.shape[-1]]


class Collects(Body):
    """Fills a list of its own that it reads again in the same call."""

    def forward(self, x: Tensor) -> Tensor:
        self.parts: list[Tensor] = []
        self.parts.append(super().forward(x))
        y = torch.cat(self.parts)
        self.parts.clear()
        return y


class LeavesMore(Body):
    """Leaves a detached tensor, a size and a flag for code around it; ``p`` is set to what it was."""

    last: Tensor | None = None
    length = 0
    ran = False

    def forward(self, x: Tensor) -> Tensor:
        self.p, self.length, self.ran = 0.5, x.shape[0], True
        y = super().forward(x)
        self.last = y.detach()
        return y


class Flips(Body):
    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 0.5:
            x = x.flip(-1)
        return super().forward(x)


class Scales(Body):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * np.random.uniform(0.5, 1.5)


class OwnGenerator(Body):
    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.generator.random()


class DropsNothing(Body):
    """As the decoders of transformers do where the rate of dropped layers is 0."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and random.uniform(0, 1) < 0.0:
            return x
        return super().forward(x)


class Augments(Body):
    def augment(self, x: Tensor) -> Tensor:
        return x.flip(-1) * float(np.random.rand()) if random.random() < 0.5 else x

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.augment(x))


class Outer(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.head = part, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.part(x))


def read(recording: Recording) -> set[str]:
    return {str(each.place) for each in recording.python.read if each.place.module != __name__}


def test_attributes_that_forward_reads_are_known() -> None:
    assert read(record(Outer(Body()), (X,))) == {"part.tau", "part.warm", "part.p"}


def test_recording_leaves_the_class_of_all_modules_as_it_was() -> None:
    before = dict(vars(nn.Module))
    record(Body(), (X,))
    with pytest.raises(CaptureError):
        record(Flips(), (X,))
    assert dict(vars(nn.Module)) == before


class Counter:
    def __init__(self) -> None:
        self.n, self.lengths, self.mean = 0, [0], torch.zeros(())
        self.parts: dict[str, Any] = {"mean": torch.zeros(()), "lengths": deque([0])}


class Counted(Body):
    """An object that it holds counts the calls, keeps their lengths and averages the outputs in place."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter()

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.counter.n += 1
        self.counter.lengths.append(len(x))
        self.counter.parts["lengths"].append(len(x))
        for mean in (self.counter.mean, self.counter.parts["mean"]):
            mean.lerp_(y.detach().mean(), 0.1)
        return y


def test_recording_leaves_objects_that_a_model_holds_as_they_were() -> None:
    model = Counted()
    counter = model.counter
    record(model, (X,))
    assert (counter.n, counter.lengths, list(counter.parts["lengths"])) == (0, [0], [0])
    assert float(counter.mean) == 0 and float(counter.parts["mean"]) == 0


class ByMode(Body):
    """Multiplies by one tensor in training and by another, equal one in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = {True: torch.ones(4), False: torch.ones(4)}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factors[self.training]


def test_equal_tensors_that_a_model_holds_stay_two() -> None:
    model = ByMode()
    recording = record(model, (X,))
    model.factors[False].fill_(3.0)
    assert torch.equal(recording.eval.eval()(X), model.eval()(X))


def test_a_configuration_that_a_model_reads_is_known_by_its_fields() -> None:
    model, args, kwargs = huggingface_call("gpt2")
    found = read(record(model, args, kwargs))
    assert "config.output_hidden_states" in found and "transformer.h.0.attn.attn_dropout.p" in found
    assert "config.pad_token_id" not in found


class Settings:
    """An ordinary class; ``scale`` is an attribute of the class."""

    scale = 2.0
    sub: Any
    n: int

    def __init__(self, **inner: Any) -> None:
        self.unread = 1
        self.__dict__.update(inner)


class ReadsSettings(Body):
    sizes = (1, 2)

    def __init__(self) -> None:
        super().__init__()
        self.cfg, self.space = Settings(sub=Settings(k=1.0)), SimpleNamespace(k=2.0)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.cfg.scale * self.cfg.sub.k * self.space.k * getattr(self, "gain", 1.0) * sum(self.sizes)
        return self.down(self.up(x)) * scale * getattr(self.cfg, "more", 1.0)


def test_attributes_of_objects_of_classes_and_missing_ones_are_known() -> None:
    before = dict(vars(Settings))
    found = read(record(Outer(ReadsSettings()), (X,)))
    assert found >= {"part.cfg.scale", "part.cfg.sub.k", "part.cfg.more", "part.space.k", "part.gain", "part.sizes"}
    assert not any("unread" in each for each in found)
    assert dict(vars(Settings)) == before


class CountsInSettings(Body):
    def __init__(self) -> None:
        super().__init__()
        self.cfg = Settings(n=0)

    def forward(self, x: Tensor) -> Tensor:
        self.cfg.n += 1
        return super().forward(x)


def test_a_counter_in_an_object_is_only_worth_a_note() -> None:
    recording = record(CountsInSettings(), (X,))
    assert recording.leaves == {} and "cfg.n" in recording.python.notes[0]


def test_modules_that_the_graph_calls_read_for_themselves() -> None:
    assert read(record(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)), (X,))) == set()


@pytest.mark.parametrize("kind", [WarmsUp, Remembers])
def test_an_attribute_that_a_call_leaves_for_the_next_keeps_its_module_whole(kind: type[nn.Module]) -> None:
    recording = record(Outer(kind()), (X,))
    assert list(recording.leaves) == ["part"]
    assert "from call to call" in recording.leaves["part"] and "test_outside.py:" in recording.leaves["part"]
    with pytest.raises(CaptureError, match=r"from call to call \(.*test_outside\.py:\d+\)"):
        record(kind(), (X,))


def test_a_whole_module_goes_on_counting() -> None:
    model = Outer(WarmsUp())
    recording = record(model, (X,))
    first, second = recording.train.eval()(X), recording.train(X)
    assert model.part.n == 2 and not torch.equal(first, second)


def test_a_counter_that_nothing_reads_is_only_worth_a_note() -> None:
    recording = record(Counts(), (X,))
    assert recording.leaves == {}
    assert "does not count" in recording.python.notes[0] and "test_outside.py:" in recording.python.notes[0]


def test_a_table_made_at_the_first_call_is_no_obstacle() -> None:
    recording = record(Caches(), (X,))
    assert recording.leaves == {} and recording.python.notes == ()
    assert read(recording) == {"tau", "warm", "p"}


class KeepsTheFirst(Body):
    """Keeps a mean or a mask of its first inputs, or its first weights."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.kept = kept
        self.cache: dict[Any, Tensor] = {}

    @functools.cached_property
    def weights(self) -> Tensor:
        return self.up.weight.detach().mean(0)

    def forward(self, x: Tensor) -> Tensor:
        makes: dict[str, Callable[[], Tensor]] = {
            "mean": lambda: x.detach().mean(0),
            "mask": lambda: (x.detach() > 0).float(),
            "weights": lambda: self.up.weight.detach().mean(0),
        }
        if self.kept == "property":
            return super().forward(x) - self.weights
        if (self.kept, len(x)) not in self.cache:
            self.cache[self.kept, len(x)] = makes[self.kept]()
        kept = self.cache[self.kept, len(x)]
        return super().forward(x - kept)


@pytest.mark.parametrize("kept", ["mean", "mask"])
def test_values_of_the_first_inputs_that_are_kept_keep_their_module_whole(kept: str) -> None:
    model = Outer(KeepsTheFirst(kept))
    reference = copy.deepcopy(model).eval()
    recording = record(model, (X,))
    assert "from call to call" in recording.leaves["part"]
    for _ in range(3):
        x = torch.randn(3, 4)
        assert torch.equal(recording.eval.eval()(x), reference(x))
    with pytest.raises(CaptureError, match=r"changes cache from call to call"):
        record(KeepsTheFirst(kept), (X,))


@pytest.mark.parametrize("kept", ["weights", "property"])
def test_weights_of_the_first_call_that_are_kept_are_worth_a_note(kept: str) -> None:
    recording = record(KeepsTheFirst(kept), (X,))
    assert recording.leaves == {}
    assert any("keeps values of its first call" in note for note in recording.python.notes)


class CountsInAnArray(Body):
    def __init__(self, counts: Any) -> None:
        super().__init__()
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        self.counts[0] += 1
        return super().forward(x) * (2.0 if self.counts[0] > 2 else 1.0)


@pytest.mark.parametrize("counts", [array.array("i", [0]), bytearray(1), np.zeros(1)], ids=lambda x: type(x).__name__)
def test_a_count_in_an_array_keeps_its_module_whole_and_recording_does_not_count(counts: Any) -> None:
    model = Outer(CountsInAnArray(counts))
    recording = record(model, (X,))
    assert "from call to call" in recording.leaves["part"] and counts[0] == 0
    recording.eval.eval()(X)
    assert counts[0] == 1


def test_a_tensor_left_in_an_attribute_for_the_training_loop_is_worth_a_note() -> None:
    (note,) = record(LeavesALoss(), (X,)).python.notes
    assert "balance" in note and "return them" in note


@pytest.mark.parametrize("place", ["list", "dict", "deque", "object"])
def test_a_tensor_left_in_a_container_is_worth_a_note_and_a_table_kept_there_is_not(place: str) -> None:
    model = LeavesItIn(place)
    (note,) = record(model, (X,)).python.notes
    assert not getattr(model.losses, "losses", model.losses)  # the model is as it was
    assert "losses" in note and "return them" in note and "table" not in note


def test_a_list_that_a_call_empties_again_is_worth_no_note() -> None:
    assert record(Collects(), (X,)).python.notes == ()


def test_any_value_left_in_an_attribute_is_worth_a_note() -> None:
    model = LeavesMore()
    model(X)  # it holds the values of an earlier call
    model.ran = False
    (note,) = record(model, (X,)).python.notes
    assert all(name in note for name in ("last", "length", "ran")) and "p (" not in note


@pytest.mark.parametrize("kind", [Flips, Scales, OwnGenerator])
@pytest.mark.parametrize("seed", range(3))
def test_draws_outside_torch_keep_their_module_whole_whatever_was_drawn(kind: type[nn.Module], seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    model = Outer(kind())
    recording = record(model, (X,))
    assert "test_outside.py:" in recording.leaves["part"]
    recording.train.eval()
    assert len({tuple(recording.train(X).flatten().tolist()) for _ in range(20)}) > 1
    with pytest.raises(CaptureError, match=r"random numbers of Python or numpy \(.*test_outside\.py:\d+\)"):
        record(kind(), (X,))


class Chance:
    def __init__(self) -> None:
        self.generator = random.Random(0)

    def __call__(self) -> float:
        return self.generator.random()


GENERATOR = np.random.default_rng(0)


class SeldomSkips(Body):
    """Skips its layers at one of ten calls, by a generator that lies elsewhere than in an attribute."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.chance, self.generators = place, Chance(), [random.Random(0)]

    def forward(self, x: Tensor) -> Tensor:
        draws: dict[str, Callable[[], float]] = {"file": GENERATOR.random, "list": self.generators[0].random}
        drawn = draws.get(self.place, self.chance)()
        return x if drawn < 0.1 else super().forward(x)


@pytest.mark.parametrize("place", ["file", "list", "object"])
def test_generators_are_found_in_files_containers_and_objects(place: str) -> None:
    assert "random numbers" in record(Outer(SeldomSkips(place)), (X,)).leaves["part"]


class SkipsByNumpy(Body):
    """Draws in compiled code of numpy, whose return Python does not show, and then reads a layer or calls a method."""

    def __init__(self, method: bool) -> None:
        super().__init__()
        self.method = method

    def head(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))

    def forward(self, x: Tensor) -> Tensor:
        drawn = np.random.rand()
        y = self.head(x) if self.method else self.down(self.up(x))
        return x if drawn < 0.1 else y


@pytest.mark.parametrize("method", [True, False])
def test_draws_of_numpy_are_the_forwards_that_made_them(method: bool) -> None:
    assert "test_outside.py:" in record(Outer(SkipsByNumpy(method)), (X,)).leaves["part"]
    with pytest.raises(CaptureError, match=r"random numbers of Python or numpy \(.*test_outside\.py:\d+\)"):
        record(SkipsByNumpy(method), (X,))


def test_a_method_that_draws_is_one_call_made_again_at_every_run() -> None:
    model = Augments()
    recording = record(model, (X,))
    assert (
        recording.leaves == {} and len(recording.train.graph.find_nodes(op="call_module", target="frac.methods.0")) == 1
    )
    model.eval()
    for seed in range(5):
        outputs = []
        for run in (model, recording.train.eval()):
            random.seed(seed)
            np.random.seed(seed)
            outputs.append(run(X))
        assert torch.equal(*outputs)


def test_draws_that_decide_nothing_change_nothing() -> None:
    assert record(DropsNothing(), (X,)).leaves == {}


def test_generators_can_be_made_to_give_a_level() -> None:
    for level in LEVELS:
        with preserved_random_state():
            set_level(level)
            assert random.random() == pytest.approx(level, abs=1e-5)
            assert np.random.random(100) == pytest.approx(np.full(100, level), abs=1e-5)
            assert np.isfinite(np.random.randn(10)).all()


@pytest.mark.parametrize("call", [timm_call("resnet10t", 32), huggingface_call("gpt2")], ids=["resnet10t", "gpt2"])
def test_usual_models_leave_nothing_to_note(call: Call) -> None:
    model, args, kwargs = call
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recording: Any = record(model, args, kwargs)
    assert recording.python.notes == () and recording.leaves == {}


def test_activation_checkpointing_is_noticed() -> None:
    model: Any
    model, args, kwargs = huggingface_call("gpt2")
    assert not record(model, args, {**kwargs, "use_cache": False}).python.checkpointed
    model.gradient_checkpointing_enable()
    assert record(model, args, {**kwargs, "use_cache": False}).python.checkpointed


def test_the_frames_that_specaugment_masks_are_drawn_by_one_call() -> None:
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    sizes |= {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_feat_extract_layers": 2}
    sizes |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "mask_time_length": 2}
    # The adapter draws from numpy too, which layers to drop; at a rate of 0 that decides nothing.
    config = transformers.Wav2Vec2Config(**sizes, add_adapter=True, layerdrop=0.0)
    assert record(transformers.Wav2Vec2Model(config), (torch.randn(2, 2000),)).leaves == {}


@torch.jit.script
def _charge(v: Tensor, x: Tensor) -> Tensor:
    return v + x * 0.5


class Neuron(nn.Module):
    """Keeps what it was charged with from call to call, by code that a recording does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.v: float | Tensor = 0.0

    def forward(self, x: Tensor) -> Tensor:
        v = torch.zeros_like(x) if isinstance(self.v, float) else self.v
        self.v = v = _charge(v, x)
        return v


class Resetting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.neuron, self.last = nn.Linear(4, 4), Neuron(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.neuron.v = 0.0
        return self.last(self.neuron(self.first(x)) + self.neuron(x))


class Remembering(nn.Module):
    """Keeps its charge in a dictionary, as spiking libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.memories: dict[str, float | Tensor] = {"v": 0.0}

    def forward(self, x: Tensor) -> Tensor:
        v = self.memories["v"]
        self.memories["v"] = _charge(torch.zeros_like(x) if isinstance(v, float) else v, x)
        return self.memories["v"]  # type: ignore[return-value]


class Forgetting(Resetting):
    """The same reset in a way that no attribute tells of."""

    def __init__(self) -> None:
        super().__init__()
        self.neuron: Any = Remembering()

    def forward(self, x: Tensor) -> Tensor:
        self.neuron.memories["v"] = 0.0
        return self.last(self.neuron(self.first(x)) + self.neuron(x))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Resetting, r"sets neuron\.v of a part that stays one call"),
        (Forgetting, r"Forgetting itself .* in a second call output differs by .* 'neuron'"),
    ],
)
def test_what_a_part_keeps_and_the_code_around_it_takes_back_is_not_left_out_of_the_graph(
    model: type[nn.Module], message: str
) -> None:
    with pytest.raises(CaptureError, match=message):
        record(model(), (torch.randn(2, 4),))
    inner = nn.Sequential(nn.Linear(4, 4), model())
    recording = record(inner, (torch.randn(2, 4),))
    assert list(recording.leaves) == ["1"]
    x = torch.randn(2, 4)
    assert all(torch.equal(recording.eval(x), inner.eval()(x)) for _ in range(3))


class Shifting(nn.Module):
    """Keeps what it computed for calls with a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.shift: Tensor | None = None

    def forward(self, x: Tensor, cached: bool = False) -> Tensor:
        if self.shift is None or not cached:
            self.shift = x.sum(1, keepdim=True).detach()
        return self.fc(x) + self.shift


def test_a_kept_tensor_that_the_run_replaces_is_compared_outside_of_the_graph() -> None:
    model = Shifting()
    model(2 * X)
    assert torch.equal(record(model, (X,)).eval(X), model(X))


class NewClass(nn.Module):
    """Makes the class of its result anew in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        Output = namedtuple("Output", "y z")
        return Output(self.fc(x), x)


def test_a_named_tuple_made_anew_in_each_call_is_the_same() -> None:
    recording = record(NewClass(), (X,))
    assert recording.eval(X)._fields == ("y", "z")


class Adding(nn.Module):
    """Puts its results into the dictionary that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        found["y"] = self.fc(found["x"])
        return found


def test_a_model_may_add_to_the_dictionary_that_it_is_given() -> None:
    model = Adding()
    recording = record(model, ({"x": X},))
    assert torch.equal(recording.eval({"x": X})["y"], model({"x": X.clone()})["y"])


def _noise(x: Tensor) -> Any:
    return np.random.rand(x.shape[-1]).astype(np.float32)


class AddsNoise(Body):
    """Draws an array by a function, and hands it to torch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.as_tensor(_noise(x)))


class ShiftsNoise(Body):
    """Works on the array before torch gets it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.from_numpy(_noise(x).clip(0.25, 0.75)))


def test_a_function_that_draws_an_array_is_one_call_if_torch_takes_the_array() -> None:
    model = AddsNoise().eval()
    recording = record(model, (X,))
    assert recording.leaves == {}
    x = torch.randn(5, 4)
    for seed in (1, 2):
        np.random.seed(seed)
        expected = model(x)
        np.random.seed(seed)
        assert torch.equal(recording.eval(x), expected)
    whole = nn.Sequential(ShiftsNoise())
    assert list(record(whole, (X,)).leaves) == ["0"]


class MakesGenerator(nn.Linear):
    """Adds noise of a generator that each call makes."""

    def __init__(self, *seed: int) -> None:
        super().__init__(4, 4)
        self.seed = seed

    def forward(self, x: Tensor) -> Tensor:
        noise = np.random.default_rng(*self.seed).standard_normal(4, dtype=np.float32)
        return super().forward(x) + torch.from_numpy(noise)


def test_a_generator_that_a_call_makes_needs_a_seed() -> None:
    model = MakesGenerator(3)
    assert torch.equal(record(model, (X,)).train(X), model(X))
    with pytest.raises(CaptureError, match="makes a generator without a seed"):
        record(MakesGenerator(), (X,))


class Tags(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y: Any = super().forward(x)
        y.scale = 3.0
        return y


def test_attributes_of_a_returned_tensor_are_told_of() -> None:
    [note] = record(Tags(4, 4), (X,)).python.notes
    assert "sets scale on a tensor that it returns" in note
