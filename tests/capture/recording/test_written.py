"""State that a forward changes: the graph changes it as the model does, and recording leaves nothing on it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fractrain_fx import FracConfig, FracModel, fractrainify
from fractrain_fx.errors import CaptureError
from tests.build import rewritten as build_rewritten

FLOAT = FracConfig(method="float")


class Norm(nn.Module):
    """A batch norm by hand between two layers."""

    mean: Tensor
    var: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        mean, var = self.mean, self.var
        if self.training:
            mean, var = h.mean(0), h.var(0)
            self.mean = 0.9 * self.mean + 0.1 * mean.detach()
            self.var = 0.9 * self.var + 0.1 * var.detach()
        return self.last((h - mean) / (var + 1e-5).sqrt())


class ReadsWhatItWrote(Norm):
    def forward(self, x: Tensor) -> Tensor:
        before, h = self.mean, self.first(x)
        self.mean = (0.9 * self.mean + 0.1 * h.mean(0)).detach()
        return self.last((h - before) * self.mean)


class WritesInPlace(Norm):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.training:
            with torch.no_grad():
                self.mean.copy_(0.9 * self.mean + 0.1 * h.mean(0))
                self.var.lerp_(h.var(0), 0.1)
        return self.last((h - self.mean) / (self.var + 1e-5).sqrt())


class WritesIntoTheDictionary(Norm):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        out = self.last(h - self.mean)
        self._buffers["mean"] = 0.9 * self.mean + 0.1 * h.mean(0).detach()
        return out


class CountsCalls(Norm):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return super().forward(x) / self.calls


class WritesToItsPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = Norm(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.last(self.norm(x))
        self.norm.mean = self.norm.mean + h.mean().detach()
        return h


class StatisticsOfTheInput(nn.Module):
    """Beside the layers, so that nothing in the region needs a gradient while the model is recorded."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.5).add_(0.5 * x.mean(0))
            self.mean.lerp_(x.mean(0), 0.1)
        return self.last(self.first(x - self.mean))


class FrozenStatistics(nn.Module):
    """Running statistics that are parameters without a gradient."""

    def __init__(self, training: bool | None = None) -> None:
        super().__init__()
        self.first, self.last, self.mode = nn.Linear(5, 6), nn.Linear(6, 3), training
        self.mean = nn.Parameter(torch.zeros(6), requires_grad=False)
        self.var = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        training = self.training if self.mode is None else self.mode
        return self.last(F.batch_norm(self.first(x), self.mean, running_var=self.var, training=training))


class Momentum(nn.Module):
    """A frozen copy that follows the trained layer (momentum contrast, BYOL)."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.last = nn.Linear(5, 6), nn.Linear(5, 6).requires_grad_(False), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                    key.mul_(0.9).add_(query, alpha=0.1)
        return self.last(self.query(x) * self.key(x).detach())


class WritesToAFrozenParameter(Momentum):
    def forward(self, x: Tensor) -> Tensor:
        self.key.bias.mul_(0.9).add_(0.1)
        return self.last(self.query(x) * self.key(x))


class WritesData(Momentum):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.key.weight.data = 0.5 * self.key.weight.data + 0.5 * self.query.weight.data
            key = self.key(x)
        self.key.bias.data.mul_(0.5)
        return self.last(self.query(x) * key)


class Codebook(nn.Module):
    """VQ-VAE with moving averages (van den Oord 2017, appendix A.1)."""

    codes: Tensor
    counts: Tensor
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 5)
        self.register_buffer("codes", torch.randn(8, 4))
        self.register_buffer("counts", torch.zeros(8))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.first(x)
        nearest = torch.cdist(z, self.codes).argmin(1)
        code = F.embedding(nearest, self.codes)
        if self.training:
            chosen = F.one_hot(nearest, 8).type_as(z)
            self.counts = 0.9 * self.counts + 0.1 * chosen.sum(0)
            self.sums = 0.9 * self.sums + 0.1 * chosen.t() @ z.detach()
            self.codes = self.sums / (self.counts + 1e-5).unsqueeze(1)
        return self.last(z + (code - z).detach()), F.mse_loss(z, code.detach())


class WeightDrop(nn.Module):
    """Sets a dropped weight on its module in each call (Merity et al. 2017)."""

    def __init__(self, module: nn.Module, name: str = "weight") -> None:
        super().__init__()
        self.module, self.name = module, name
        weight = getattr(module, name)
        del module._parameters[name]
        self.raw = nn.Parameter(weight.detach())
        if isinstance(module, nn.LSTM):
            module.flatten_parameters = lambda: None  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        dropped = F.dropout(self.raw, 0.5, training=self.training)
        # Dropout returns the parameter in evaluation, and the module would refuse other tensors from then on.
        setattr(self.module, self.name, dropped if self.training else dropped.view_as(dropped))
        out = self.module(x)
        return out[0] if isinstance(out, tuple) else out


class DropsWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = WeightDrop(nn.Linear(5, 6)), WeightDrop(nn.LSTM(6, 6), "weight_hh_l0")
        self.last = WeightDrop(nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


class DropsEmbeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = WeightDrop(nn.Embedding(7, 6)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.table((3 * x.abs()).long().clamp(max=6)[:, 0]))


MODELS: list[Callable[[], nn.Module]] = [
    *(Norm, ReadsWhatItWrote, WritesInPlace, WritesIntoTheDictionary, CountsCalls, WritesToItsPart),
    *(StatisticsOfTheInput, FrozenStatistics, Momentum, WritesToAFrozenParameter, WritesData, Codebook),
    *(DropsWeights, DropsEmbeddings),
    *(lambda: FrozenStatistics(training=True), lambda: FrozenStatistics(training=False)),
]


def batches() -> list[Tensor]:
    return [torch.randn(4, 5, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


def train(model: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    """Three steps of training with one of evaluation between them."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    outputs = []
    for step, x in enumerate(inputs):
        torch.manual_seed(step)
        model.train(step != 1)
        found = model(x)
        found = found if isinstance(found, tuple) else (found,)
        if step != 1:
            torch.stack([each.square().mean() for each in found]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        outputs += [each.detach() for each in found]
    return outputs


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, b.state_dict()[name]) for name, x in a.state_dict().items())


@pytest.mark.parametrize("make", MODELS)
def test_the_graph_changes_state_as_the_model_does_and_buffers_have_no_gradient(make: Callable[[], nn.Module]) -> None:
    model = make()
    plain = copy.deepcopy(model)
    rewritten = fractrainify(model, config=FLOAT, example_inputs=(batches()[0],))
    assert equal(plain, rewritten)
    assert not any(x.requires_grad or x.grad_fn is not None for x in model.buffers())
    train(copy.deepcopy(rewritten), batches())
    train(copy.deepcopy(model), batches())
    assert not any(x.requires_grad for x in model.buffers())
    for ours, theirs in zip(train(rewritten, batches()), train(plain, batches()), strict=True):
        assert torch.equal(ours, theirs)
    assert equal(plain, rewritten) and equal(plain, rewritten.restore())


def test_a_buffer_that_is_a_view_is_cut_from_gradients_too() -> None:
    model = StatisticsOfTheInput()
    model.mean = torch.zeros(2, 5)[0]
    rewritten = fractrainify(model, config=FLOAT, example_inputs=(batches()[0],))
    assert not model.mean.requires_grad
    train(rewritten, batches())


def test_quantized_training_moves_the_statistics_of_each_step_once() -> None:
    rewritten = fractrainify(WritesToItsPart(), config=FracConfig(method="pfq"), example_inputs=(batches()[0],))
    before = rewritten.norm.mean
    train(rewritten, batches())
    assert rewritten.norm.mean is not before and not torch.equal(rewritten.norm.mean, before)


def test_all_recordings_write_to_one_buffer() -> None:
    class Shifted(Norm):
        def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
            out = super().forward(x)
            return out if shift is None else out + shift * self.mean.sum()

    model = Shifted()
    plain = copy.deepcopy(model)
    rewritten = fractrainify(model, config=FLOAT, example_inputs=(batches()[0],))
    for _ in range(2):
        for call in ((batches()[0],), (batches()[1], torch.ones(()))):
            assert torch.equal(rewritten(*call), plain(*call))
    assert equal(plain, rewritten)


def test_a_saved_model_goes_on_with_its_statistics(tmp_path: Path) -> None:
    rewritten = fractrainify(Norm(), config=FLOAT, example_inputs=(batches()[0],))
    train(rewritten, batches())
    rewritten.save_pretrained(tmp_path)
    loaded = FracModel.from_pretrained(tmp_path, model=Norm())
    assert equal(rewritten, loaded)
    assert all(map(torch.equal, train(rewritten, batches()), train(loaded, batches())))
    assert equal(rewritten, loaded)


class Resizes(nn.Module):
    """Keeps its last output in a buffer, or a parameter without a gradient, that it gives the output's size."""

    kept: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self._how = nn.Linear(4, 4), how
        if how == "parameter":
            self.kept = nn.Parameter(torch.zeros(0, 4), requires_grad=False)
        else:
            self.register_buffer("kept", torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        value = y.detach().clone()
        if self._how == "resize":
            self.kept.resize_(value.shape).copy_(value)
        elif self._how == "set":
            self.kept.set_(value)
        else:
            self.kept.data = value
        return y + self.kept.mean()


@pytest.mark.parametrize("how", ["resize", "set", "data", "parameter"])
def test_a_tensor_that_forward_resizes_in_place_is_refused_by_name_and_stays_as_it_was(how: str) -> None:
    net, x = Resizes(how), torch.randn(3, 4)
    with pytest.raises(CaptureError, match=r"changes the shape or the type of 'kept' .*call the model once before"):
        build_rewritten(net, x, config=FLOAT)
    assert net.kept.shape == (0, 4)
    net(x)  # sized by now
    assert torch.equal(build_rewritten(copy.deepcopy(net), x, config=FLOAT)(x), net(x))


def test_a_buffer_that_the_first_call_makes_is_refused_with_its_line() -> None:
    class Lazy(Norm):
        seen: Tensor | None

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", None)

        def forward(self, x: Tensor) -> Tensor:
            self.seen = torch.zeros(6) if self.seen is None else self.seen + 1
            return super().forward(x)

    line = Lazy.forward.__code__.co_firstlineno + 1
    with pytest.raises(CaptureError, match=rf"it makes buffer 'seen'.*{re.escape(Path(__file__).name)}:{line}"):
        fractrainify(Lazy(), config=FLOAT, example_inputs=(batches()[0],))
    model = Lazy()
    model(batches()[0])
    plain = copy.deepcopy(model)
    rewritten = fractrainify(model, config=FLOAT, example_inputs=(batches()[0],))
    assert all(map(torch.equal, train(rewritten, batches()), train(plain, batches())))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = Norm(), nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.norm(x))


class Residual(nn.Module):
    """Its blocks read a buffer that its end changes, so that a block that runs again must read the old values."""

    seen: Tensor

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.last, self.in_place = nn.Linear(5, 2), in_place
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x + self.seen)
        if self.in_place:
            self.seen.mul_(0.5).add_(0.5 * x.mean(0).detach())
        else:
            self.seen = 0.5 * self.seen + 0.5 * x.mean(0).detach()
        return self.last(x)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("method", ["float", "pfq"])
def test_segments_that_run_again_write_once_and_read_what_they_read(method: str, in_place: bool) -> None:
    model = Residual(in_place)
    config = FracConfig(method=method)  # type: ignore[arg-type]
    kept, again = (fractrainify(copy.deepcopy(model), config=config, example_inputs=(batches()[0],)) for _ in "ab")
    again.gradient_checkpointing_enable()
    assert all(map(torch.equal, train(kept, batches()), train(again, batches())))
    assert equal(kept, again)


@pytest.mark.long
@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_graphs_replace_buffers_without_a_break(checkpointed: bool) -> None:
    model = Residual(in_place=False)
    plain = copy.deepcopy(model)
    rewritten = fractrainify(model, config=FLOAT, example_inputs=(batches()[0],))
    if checkpointed:
        rewritten.gradient_checkpointing_enable()
    compiled: Any = torch.compile(rewritten, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(train(compiled, batches()), train(plain, batches()), strict=True):
        torch.testing.assert_close(ours, theirs)
    for name, x in plain.state_dict().items():
        torch.testing.assert_close(rewritten.state_dict()[name], x)  # compiled code may round sums otherwise


def _work(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = Residual(in_place=False)
    plain = copy.deepcopy(model)
    rewritten = build_rewritten(model, batches()[0], config=FLOAT, check=True)
    mine = [x[2 * rank :][:2] for x in batches()]
    ours, theirs = (train(DistributedDataParallel(each), mine) for each in (rewritten, plain))
    assert all(map(torch.equal, ours, theirs)) and equal(plain, rewritten)
    dist.destroy_process_group()


@pytest.mark.long
def test_processes_broadcast_replaced_buffers_as_they_do_for_the_model(tmp_path: Path) -> None:
    mp.spawn(_work, (str(tmp_path),), nprocs=2)
