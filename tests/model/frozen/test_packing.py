"""Frozen weights as codes: the numbers of the floats at a fraction of their bytes, on a LLaMA-type model with LoRA."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

from fractrain_fx import AffineConfig, Engine, FracConfig, FracModel, Precision, RunConfig, fractrainify
from fractrain_fx.errors import ConfigError, InputError, ModelError
from tests.build import paper
from tests.model.frozen.packed import BATCH, FIRST, FRACTRAIN, HEAD, PFQ, WORDS, llama, packed, rewrite, rewritten


def steps(model: FracModel, run: Any = None) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logits of two training steps and of evaluation, and the last gradients."""
    torch.manual_seed(3)
    model.train()
    found = []
    for _ in range(2):
        model.zero_grad()
        output = (model if run is None else run)(**BATCH)
        output.loss.backward()
        found.append(output.logits.detach())
    with torch.no_grad():
        found.append(model.eval()(**BATCH).logits)
    return found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def require_same(a: tuple[list[Tensor], dict[str, Tensor]], b: tuple[list[Tensor], dict[str, Tensor]]) -> None:
    assert all(map(torch.equal, a[0], b[0]))
    assert a[1].keys() == b[1].keys() and all(torch.equal(a[1][name], b[1][name]) for name in a[1])


@pytest.mark.parametrize(
    "config",
    [
        FRACTRAIN,
        PFQ,
        FracConfig(method="static", precision="4/8"),
        pytest.param(paper(weight_bits=5, run=RunConfig(skipping="left-out")), marks=pytest.mark.long),
        pytest.param(FracConfig(method="dfq", weight_bits=3, pins=HEAD), marks=pytest.mark.long),
        pytest.param(FRACTRAIN.replace(**{"run.backend": "cpu"}), marks=pytest.mark.long),
    ],
)
def test_outputs_and_gradients_are_those_of_the_floats(config: FracConfig) -> None:
    plain = rewritten(config)
    model = copy.deepcopy(plain)
    model.pack_frozen()
    require_same(steps(model), steps(plain))
    again = copy.deepcopy(model)
    again.gradient_checkpointing_enable()
    require_same(steps(again), steps(model))


@pytest.mark.long
def test_a_half_type_and_autocast_have_the_numbers_of_the_floats() -> None:
    plain = rewrite(llama().to(torch.bfloat16))
    model = copy.deepcopy(plain)
    model.pack_frozen()
    require_same(steps(model), steps(plain))
    plain, model = rewritten(), packed()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        require_same(steps(model), steps(plain))


def test_the_base_takes_at_most_016_of_float32_and_the_floats_are_freed() -> None:
    model = rewrite(llama(width=256, layers=2))
    frozen = {name: p.numel() for name, p in model.named_parameters() if not p.requires_grad}
    floats = weakref.ref(model.get_parameter(FIRST))
    told = model.pack_frozen()
    gc.collect()
    assert floats() is None
    tensors = {**dict(model.named_parameters()), **{n: x for n, x in model.named_buffers() if ".frozen." in n}}
    held = sum(x.nbytes for name, x in tensors.items() if not x.requires_grad)
    share = held / sum(4 * count for count in frozen.values())
    assert share == pytest.approx(told.share) and share <= 0.16
    assert set(told.bits.values()) == {4, 8} and set(told.bits) | set(told.left) == set(frozen)
    assert "embed_tokens" in " ".join(told.left) and f"{share:.3f} of float32" in str(told)


def test_the_loss_falls_and_the_adapters_merge_into_the_original() -> None:
    model = packed(PFQ)
    engine, trained = Engine(model), [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, 3e-2), []
    codes = {name: x.clone() for name, x in model.state_dict().items() if ".frozen." in name}
    for _ in range(30):
        loss = model(**BATCH).loss
        engine.loss(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    assert all(torch.equal(model.state_dict()[name], x) for name, x in codes.items())
    restored = model.restore().eval()
    assert isinstance(restored, peft.PeftModel) and isinstance(restored.get_parameter(FIRST), nn.Parameter)
    with torch.no_grad():
        expected = restored(**BATCH).logits
        merged = restored.merge_and_unload()
        # One product with the sum of two weights, instead of the sum of two products.
        torch.testing.assert_close(merged(**BATCH).logits, expected, rtol=1e-4, atol=1e-5)
    assert isinstance(merged, transformers.LlamaForCausalLM)


def test_restore_gives_the_rounded_values_back_and_the_model_goes_on() -> None:
    model = packed()
    with torch.no_grad():
        before = model._state.original.eval()(**BATCH).logits  # code of the original reads values from codes
        assert torch.equal(model.restore()(**BATCH).logits, before)
    names = list(dict(model.named_parameters()))
    assert [name for name in names if not name.startswith("frac.")] == list(dict(llama().named_parameters()))
    # Rounding rounded values may move them by a last bit, and an activation near a tie with them.
    assert steps(model)[0][0].sub(steps(packed())[0][0]).abs().max() < 0.1
    assert model.pack_frozen().bits


def test_a_saved_model_comes_back_as_codes(tmp_path: Path) -> None:
    model = packed()
    steps(model)
    model.save_pretrained(tmp_path)
    again = FracModel.from_pretrained(tmp_path, model=llama())
    require_same(steps(again), steps(model))
    other = packed()
    other.load_state_dict(model.state_dict())
    assert torch.equal(steps(other)[0][2], steps(model)[0][2])


def test_checkpoints_of_the_other_form_are_refused_also_without_strict() -> None:
    model, plain = packed(), rewritten()
    for state in (llama().state_dict(), plain.state_dict()):
        with pytest.raises(ModelError, match=r"float values of .*q_proj.*load it before pack_frozen\(\)"):
            model.load_state_dict(state, strict=False)
    with pytest.raises(ModelError, match=r"8 frozen weights as codes.*model.pack_frozen\(\) before"):
        plain.load_state_dict(model.state_dict(), strict=False)
    with pytest.raises(RuntimeError, match="codes of 4 bits, and the model of 3"):
        packed(FRACTRAIN.replace(weight_bits=3)).load_state_dict(model.state_dict(), strict=False)


def test_a_shared_weight_stays_and_the_report_says_so() -> None:
    told = rewrite(llama(tied=True)).pack_frozen()
    (shared,) = (reason for reason in told.left.values() if reason.startswith("shared by"))
    assert "embed_tokens.weight and base_model.model.lm_head.weight" in shared and "1 shared by" in str(told)


def test_one_width_for_each_weight() -> None:
    with pytest.raises(ConfigError, match=r"FW-3/BW-6.*several widths.*weight_bits=4"):
        rewritten(FracConfig(method="pfq", stages="FW(3,4)/BW(6,6)")).pack_frozen()
    model = packed(PFQ)
    model.set_precision(Precision(4, 8))
    with pytest.raises(ConfigError, match=r"FW-8/BW-8 asks for 8 bits of .* codes of 4.*restore\(\)"):
        model.set_precision(Precision(8, 8))
    static = rewritten(FracConfig(method="static", precision="4/8"))
    static.set_precision(Precision(8, 8))
    with pytest.raises(ConfigError, match="FW-8 now and FW-4/BW-8 later"):
        static.pack_frozen()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (FracConfig(method="float"), "has no such weights"),
        (FracConfig(method="static", format="dorefa"), "format 'dorefa'"),
        (FracConfig(method="static", affine=AffineConfig(ranges="row")), "ranges='row'"),
    ],
)
def test_what_has_no_codes_is_refused(config: FracConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rewritten(config).pack_frozen()


def test_nothing_to_pack_and_packing_twice_are_refused() -> None:
    with pytest.raises(ModelError, match="Frozen parameters: none"):
        rewrite(llama().merge_and_unload().requires_grad_(True)).pack_frozen()
    model = packed()
    with pytest.raises(ModelError, match=r"codes already: call model.restore\(\)"):
        model.pack_frozen()
    with pytest.raises(ConfigError, match=r"codes of another rewritten model: call restore\(\)"):
        fractrainify(model._state.original, example_kwargs=BATCH, check=False)


def test_a_weight_that_is_not_finite_is_refused_and_nothing_is_packed() -> None:
    model = rewritten()
    model.get_parameter(FIRST.replace("q_proj", "v_proj")).data[0, 0] = float("nan")
    with pytest.raises(ModelError, match=r"v_proj.* has NaN or infinite values"):
        model.pack_frozen()
    assert model.get_parameter(FIRST).is_floating_point()


def test_calls_that_need_another_recording_are_refused_and_other_sizes_are_not() -> None:
    model = packed()
    original: Any = model._state.original
    assert model(**{name: x[:2, :5] for name, x in BATCH.items()}).logits.shape == (2, 5, 50)
    with pytest.raises(InputError, match=r"codes is not recorded again.*before pack_frozen\(\)"):
        model(input_ids=WORDS)
    with pytest.raises(InputError, match=r"cast it, before pack_frozen\(\)"):
        copy.deepcopy(model).to(torch.bfloat16)(**BATCH)
    with pytest.raises(ModelError, match=r"kept as codes.*model.restore\(\)"):
        original.merge_and_unload()


def test_costs_optimizers_and_groups_do_not_see_codes() -> None:
    plain, model = rewritten(), packed()
    assert [op.training_macs for op in model.ops] == [op.training_macs for op in plain.ops]
    for x in (plain, model):
        x(**BATCH)
    assert torch.equal(model.cost.cp, plain.cost.cp)
    groups = [p for group in model.param_groups(gates={"lr": 0.1}) for p in group["params"]]
    assert all(p.is_floating_point() for p in groups)
    kernels = packed(FRACTRAIN.replace(**{"run.backend": "codes"})).kernels()
    assert "its frozen weight is kept as codes, which are read as floats" in kernels.values()


@pytest.mark.slow
def test_a_compiled_model_has_the_numbers_of_the_compiled_floats() -> None:
    plain = rewritten(PFQ)
    model = copy.deepcopy(plain)
    model.pack_frozen()
    found = []
    for each in (plain, model):
        torch._dynamo.reset()
        found.append(steps(each, torch.compile(each, fullgraph=True, backend="eager")))
    require_same(*found)
