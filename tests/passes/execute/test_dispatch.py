"""Dispatched models compute the samples that run, with the outputs, gradients and costs of the masked form."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fractrain_fx import Engine, FracConfig, FracModel, RunConfig, fractrainify, plan, summarize
from fractrain_fx.capture import resize_batch
from fractrain_fx.execution.fused_op import FusedOp
from fractrain_fx.passes import FindSeparableBlocks, default_passes, facts, undispatched
from fractrain_fx.zoo.models.transformer import TransformerLM
from tests.build import objective, paper
from tests.build import rewritten as build_rewritten
from tests.choices import choose, without_gradient_of_skipping
from tests.models import Case, build, some_long
from tests.residual import Residual

SAMPLES = 6
OPTIONS = {"slu": 2, "dfq": 7}


_SMALL: dict[str, tuple[int, dict[str, Any]]] = {
    "resnet10t": (32, {}),
    "vit_tiny_patch16_224": (32, {"img_size": 32, "depth": 3}),
    "swin_tiny_patch4_window7_224": (112, {"img_size": 112, "depths": (2, 2), "num_heads": (2, 4), "embed_dim": 16}),
}


def case_of(name: str) -> Case:
    torch.manual_seed(0)
    if name in _SMALL:
        size, options = _SMALL[name]
        return Case(timm.create_model(name, num_classes=10, **options), (torch.randn(2, 3, size, size),))
    if name == "transformer_base":
        model = TransformerLM(50, width=32, hidden=64, layers=6, heads=2, dropout=0.0)
        return Case(model, (torch.randint(50, (2, 7)),))
    return build(name)


def batch_of(case: Case, samples: int = SAMPLES) -> tuple[list[Any], dict[str, Any]]:
    args, kwargs = resize_batch([list(case.args), case.keywords], samples)
    for x in tree_leaves(args):
        if isinstance(x, Tensor) and x.is_floating_point():
            x.normal_()
    return args, kwargs


def rewritten(case: Case, skipping: Any = 0.0, method: str = "slu", **changes: Any) -> FracModel:
    """A copy of the model, without what is random or counts samples: dropout, and batch norm's own statistics."""
    torch.manual_seed(1)
    config = paper(method, run=RunConfig(skipping=skipping), **changes)
    model = build_rewritten(replace(case, model=copy.deepcopy(case.model)), config=config).train()
    for path, module in model.named_modules():
        if isinstance(module, _BatchNorm) or "Drop" in type(module).__name__ or path == "frac.mode":
            module.eval()
    return model


def rows_of_options(options: int, blocks: int = 12) -> list[list[int]]:
    """Options of each sample: half skip one block in three, everybody skips the second."""
    chance = torch.Generator().manual_seed(0)
    rows = torch.randint(options, (blocks, SAMPLES), generator=chance)
    rows[::3, ::2] = 0
    rows[1] = 0
    return [list(map(int, row)) for row in rows]


def step(model: FracModel, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """What a training step gives: output, cost and all gradients."""
    engine = Engine(model)
    torch.manual_seed(2)
    out = model(*args, **kwargs)
    loss = engine.loss(objective(out))
    loss.backward()
    outputs = {f"out{i}": x.detach() for i, x in enumerate(tree_leaves(out)) if isinstance(x, Tensor)}
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"cost": torch.stack(list(model.cost[:5])).detach()} | outputs | gradients


def assert_same(mine: dict[str, Tensor], masked: dict[str, Tensor]) -> None:
    assert mine.keys() == masked.keys()
    for name, expected in masked.items():
        # Sums over samples are taken in another order, and nothing else is left of what cancels out (a key's bias).
        scale = float(expected.abs().max()) + 1e-3
        torch.testing.assert_close(
            mine[name], expected, rtol=1e-4, atol=3e-5 * scale, msg=partial("{}: {}".format, name)
        )


@contextmanager
def counted(model: FracModel) -> Iterator[dict[str, int]]:
    """How many samples each fused op saw."""
    seen: dict[str, int] = {}
    hooks = [
        module.register_forward_hook(
            # What each sample picked, or one width for all.
            lambda module, args, out, name=name: seen.__setitem__(name, args[0][2].numel())
        )
        for name, module in model.named_modules()
        if isinstance(module, FusedOp)
    ]
    yield seen
    for hook in hooks:
        hook.remove()


MODELS = some_long(
    ["resnet10t", "vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "transformer_base", "bert", "gpt2", "t5"],
    *("vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "transformer_base", "t5"),
)


@pytest.mark.parametrize("name", MODELS)
def test_outputs_costs_and_gradients_are_those_of_the_masked_form(name: str) -> None:
    case = case_of(name)
    args, kwargs = batch_of(case)
    results = []
    for skipping in ("computed", 0.0):
        model = rewritten(case, skipping)
        choose(model, *rows_of_options(OPTIONS["slu"]))
        if skipping == "computed":
            without_gradient_of_skipping(model)
        results.append(step(model, args, kwargs))
    assert_same(results[1], results[0])
    assert undispatched(model.graph_module) == {}


@pytest.mark.parametrize("name", ["resnet10t", "bert"])
def test_where_ranges_are_given_rounded_numbers_are_those_of_the_masked_form(name: str) -> None:
    case = case_of(name)
    args, kwargs = batch_of(case)
    found = []
    for skipping in ("computed", 0.0):
        model = rewritten(case, skipping, "dfq")
        torch.manual_seed(3)
        model(*args, **kwargs)  # the same ranges: no sample skips yet
        choose(model, *rows_of_options(OPTIONS["dfq"]))
        model.eval()
        with torch.no_grad():
            found.append([x for x in tree_leaves(model(*args, **kwargs)) if isinstance(x, Tensor)])
    for mine, masked in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, masked, rtol=1e-4, atol=1e-4)


def test_only_the_samples_that_run_are_computed() -> None:
    case = case_of("vit_tiny_patch16_224")
    args, kwargs = batch_of(case)
    model = rewritten(case, method="dfq")
    choose(model, [0, 1, 0, 2, 0, 0], [1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 0])
    step(model, args, kwargs)  # the block that nobody runs runs once, to be known
    with counted(model) as seen:
        step(model, args, kwargs)
    by_block = {
        block.name: {seen.get(f"frac.fused.{op.replace('.', '_')}") for op in block.ops} for block in model.blocks
    }
    counts = [by_block[name] for name in model.cost.choice]
    assert counts == [{2}, {6}, {None}] * (len(counts) // 3)


def test_below_the_threshold_every_bit_is_that_of_the_masked_form() -> None:
    case = case_of("resnet10t")
    args, kwargs = batch_of(case)
    results = []
    for skipping in ("computed", 0.9):
        model = rewritten(case, skipping, "dfq")
        choose(model, [0, 1, 0, 2, 0, 6], [0, 0, 5, 0, 0, 0])
        results.append(step(model, args, kwargs) | dict(model.named_buffers()))
    for name, expected in results[0].items():
        assert torch.equal(results[1][name], expected), name


def test_the_model_keeps_its_names_and_the_graph_that_is_shown() -> None:
    case = case_of("bert")
    masked, model = rewritten(case, "computed"), rewritten(case)
    assert model.code == masked.code
    assert model.state_dict().keys() == masked.state_dict().keys()
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in masked.named_parameters()]
    own = [name for name, _ in masked.named_modules()]
    added = {name for name, _ in model.named_modules()} - set(own)
    assert added and all(name.startswith("frac.dispatched") for name in added)


@pytest.mark.parametrize("skipping", ["computed", 0.0])
def test_all_samples_skip_all_blocks(skipping: str | float) -> None:
    case = case_of("transformer_base")
    args, kwargs = batch_of(case)
    model = rewritten(case, skipping)
    choose(model, [0] * SAMPLES)
    found = step(model, args, kwargs)
    zero = [name for name, p in model.named_parameters() if name.startswith("layers.") and p.grad is not None]
    assert len(zero) == sum(name.startswith("layers.") for name, _ in model.named_parameters())
    assert not any(found[name].any() for name in zero)
    model.eval()  # every range was seen
    with counted(model) as seen, torch.no_grad():
        model(*args, **kwargs)
        seen.clear()
        model(*args, **kwargs)
    assert (not any("layers" in name for name in seen)) == (skipping == 0.0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_computed_again_runs_the_same_samples(reentrant: bool) -> None:
    case = case_of("resnet10t")
    (x,), _ = batch_of(case)
    gradients = []
    for again in (False, True):
        model = rewritten(case, method="dfq")
        choose(model, *rows_of_options(OPTIONS["dfq"]))
        x = x.detach().requires_grad_()
        torch.manual_seed(3)
        # From the first step on, where blocks that nobody runs are seen for the first time.
        out = checkpoint(model, x, use_reentrant=reentrant) if again else model(x)
        out.square().sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    for name, expected in gradients[0].items():
        if "running" not in name and "frac.quant" not in name:
            assert torch.equal(gradients[1][name], expected), name


@pytest.mark.long
@pytest.mark.parametrize("name", some_long(["resnet10t", "gpt2"], "resnet10t"))
def test_under_autocast_types_and_losses_are_those_of_the_masked_form(name: str) -> None:
    case = case_of(name)
    args, kwargs = batch_of(case)
    found = []
    for skipping in ("computed", 0.0):
        model = rewritten(case, skipping)
        choose(model, *rows_of_options(OPTIONS["slu"]))
        with torch.autocast("cpu", torch.bfloat16):
            out = model(*args, **kwargs)
        found.append([x for x in tree_leaves(out) if isinstance(x, Tensor)])
        objective(out).float().backward()
        assert all(p.grad is not None for n, p in model.named_parameters() if n.startswith("frac."))
    for mine, masked in zip(found[1], found[0], strict=True):
        assert mine.dtype == masked.dtype
        torch.testing.assert_close(mine.float(), masked.float(), rtol=2e-2, atol=2e-2 * float(masked.abs().max()))


def test_copies_and_saved_models_dispatch(tmp_path: Any) -> None:
    case = case_of("bert")
    args, kwargs = batch_of(case)
    model = rewritten(case)
    model(*args, **kwargs)
    model.save_pretrained(tmp_path)
    loaded = FracModel.from_pretrained(tmp_path, model=copy.deepcopy(case.model))
    assert loaded.frac_config == model.frac_config
    for twin in (copy.deepcopy(model), loaded):
        twin.eval()
        choose(twin, [0, 1, 0, 1, 0, 0])
        with counted(twin) as seen, torch.no_grad():
            twin(*args, **kwargs)
        assert {count for name, count in seen.items() if "encoder" in name} == {2}
        running = twin._state.running[False].current()
        for node in running.graph.nodes:
            if facts(node).role == "dispatched":
                block: Any = running.get_submodule(str(node.target))
                region = block._region[0]
                assert region._modules is twin._modules


def test_a_batch_of_one_and_none_run() -> None:
    case = case_of("resnet10t")
    model = rewritten(case)
    model(*case.args)
    model.eval()
    for samples, chosen in ((1, [0]), (1, [1]), (0, [])):
        twin = copy.deepcopy(model)
        choose(twin, chosen)
        assert twin(torch.randn(samples, 3, 32, 32)).shape == (samples, 10)


def test_calibrating_sees_the_ranges_of_blocks_that_all_skip() -> None:
    case = case_of("bert")
    _, kwargs = batch_of(case)
    model = rewritten(case, method="dfq")
    choose(model, [0] * SAMPLES)
    model.eval()
    model.calibrate([kwargs])
    model(**kwargs)


@pytest.mark.long
def test_compiled_the_masked_form_runs_without_a_graph_break() -> None:
    x = torch.randn(4, 6)
    model = build_rewritten(Residual(), x, config=paper("dfq", run=RunConfig(skipping="left-out")))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for each in (model, twin):
            each.get_parameter("frac.controller.head.bias")[0] += 100.0
        torch.manual_seed(0)
        expected = model._state.recording.train(x)[0]
        torch.manual_seed(0)
        compiled = torch.compile(twin, fullgraph=True, backend="eager")(x)
    assert torch.equal(compiled, expected)


class MixesSamples(nn.Module):
    """Its second block has a mean over the batch, its third reads a number of each sample's place in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.fine, self.mean, self.placed = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(len(x), device=x.device)
        x = self.stem(x)
        x = x + self.fine(x).relu()
        y = self.mean(x).relu()
        x = x + (y - y.mean())
        x = x + self.placed(x)[places].relu()
        return self.head(x) + 0 * places[:, None]


def test_a_branch_that_needs_all_samples_runs_for_all_and_says_why() -> None:
    x = torch.randn(4, 4)
    config = FracConfig(method="slu", run=RunConfig(skipping=0.0))
    model = fractrainify(MixesSamples(), config=config, example_inputs=(x,), check=False)
    reasons = undispatched(model.graph_module)
    names = [block.name for block in model.blocks if block.skip]
    assert list(reasons) == names[1:] and len(names) == 3
    assert "mixes samples" in reasons[names[1]]
    assert "does not run for a part of the samples" in reasons[names[2]]
    for table in (summarize(model), plan(MixesSamples(), config=config, example_inputs=(x,))):
        text = str(table)
        assert "1 of 3 blocks with a skip path leave out the samples that skip them" in text
        assert names[1] in text and next(block.inseparable_because for block in table.blocks if block.skip) is None
    roles = [facts(node).role for node in model._state.running[True].current().graph.nodes]
    assert roles.count("dispatched") == 1 and roles.count("skip") == 2


def test_a_chain_without_the_trial_leaves_out_only_what_needs_none() -> None:
    """Nobody has looked which sizes grow with the batch: branches that read them from outside run for all."""
    case = case_of("bert")
    config = FracConfig(method="slu", run=RunConfig(skipping=0.0))
    chain = [each for each in default_passes(config) if not isinstance(each, FindSeparableBlocks)]
    model = fractrainify(case.model, config=config, example_kwargs=case.keywords, passes=chain, check=False)
    assert any("may depend on the number of samples" in reason for reason in undispatched(model.graph_module).values())
    choose(model, [0, 1])
    model(**case.keywords)


class Writes(nn.Module):
    """Its first branch writes into a tensor of its own, its second into what the skip path carries."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.own, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.own(x).relu_()
        return self.head(x + self.other(x.view(len(x), 2, 4).clamp_(min=-1).flatten(1)).relu())


def test_a_branch_that_writes_into_what_others_read_runs_for_all() -> None:
    x = torch.randn(4, 4)
    config = FracConfig(method="slu", run=RunConfig(skipping="left-out"))
    model = fractrainify(Writes(), config=config, example_inputs=(x,), check=False)
    names = [block.name for block in model.blocks if block.skip]
    reasons = undispatched(model.graph_module)
    assert len(names) == 2 and list(reasons) == names[1:] and "in place" in reasons[names[1]]


def test_a_user_change_of_the_graph_takes_effect() -> None:
    case = case_of("bert")
    _, kwargs = batch_of(case)
    model = rewritten(case)
    before = model(**kwargs).logits
    target = next(node for node in model.graph.nodes if "intermediate_act_fn" in str(node.target))
    with model.graph.inserting_after(target):
        doubled = model.graph.call_function(torch.zeros_like, (target,))
    target.replace_all_uses_with(doubled, delete_user_cb=lambda user: user is not doubled)
    model.graph_module.recompile()
    choose(model, [1] * SAMPLES)
    assert not torch.equal(model(**kwargs).logits, before)
