"""Transformers' own Trainer on real text: costs, stages, accumulation, checkpoints, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Trainer, TrainerCallback, TrainingArguments

from fractrain_fx import (
    Engine,
    Fixed,
    FracConfig,
    FracModel,
    GateConfig,
    RunConfig,
    Steps,
    Tokens,
    fractrainify,
    summarize,
)
from fractrain_fx.errors import (
    ConfigError,
    CostTermError,
    FracTrainWarning,
    InputError,
    NonFiniteLossError,
    RunError,
)
from fractrain_fx.integrations.huggingface import FracTrainCallback, FracTrainMixin, WatchCallback
from fractrain_fx.numerics import read_steps
from tests.integrations.stdlib_text import VOCABULARY, NextWord, WhichModule, batch
from tests.integrations.tuning import TWO_STAGES, Tuner, arguments, bert, rewritten, rewritten_bert
from tests.models import thinned


@pytest.fixture(autouse=True)
def _own_accelerator() -> Iterator[None]:
    """Leave no mixed precision to the next Accelerator of this process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def gpt2() -> nn.Module:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": VOCABULARY}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def llama() -> nn.Module:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=VOCABULARY))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def trainer_of(kind: str, model: FracModel, args: TrainingArguments, rows: Any, **options: Any) -> tuple[Trainer, Any]:
    """A Trainer with the mixin or with the callback, and the engine that it drives."""
    if kind == "mixin":
        trainer: Any = Tuner(model, args, train_dataset=rows, eval_dataset=rows, **options)
        return trainer, trainer.engine
    callback = FracTrainCallback(model, **options)
    trainer = Trainer(callback.model, args, train_dataset=rows, eval_dataset=rows, callbacks=[callback])
    return trainer, callback.engine


@pytest.mark.parametrize("kind", thinned(["callback", "mixin"], 2))
def test_bert_learns_in_two_epochs_and_a_resumed_run_equals_one_that_was_left_alone(kind: str, tmp_path: Path) -> None:
    rows = WhichModule(20)  # 5 batches: steps of 2, 2 and 1
    args = arguments(tmp_path, gradient_accumulation_steps=2, save_strategy="steps", save_steps=1)
    model = rewritten_bert()
    trainer, engine = trainer_of(kind, model, args, rows)
    model.calibrate([batch(rows, 8)])
    before = trainer.evaluate()["eval_loss"]
    trainer.train()  # with no evaluation in between: after one, Trainer itself resumes with other random numbers

    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["stage"] for entry in logs] == [1, 1, 1, 2, 2, 2]
    for entry in logs:
        assert entry["loss"] == pytest.approx(entry["task_loss"] + entry["cost_loss"], rel=1e-4)
        assert 0 <= entry["cp_percent"] <= entry["cp_total_percent"] <= 100
    assert [(row.samples, row.level) for row in engine.ledger.rows] == [(40, "cp 1 %"), (40, "cp 3 %")]
    assert trainer.evaluate()["eval_loss"] < before

    for step in (2, 3):  # in the middle of an epoch, and at its end
        again = rewritten_bert()
        other, resumed = trainer_of(kind, again, args, rows)
        other.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-{step}")
        assert_same(weights(again), weights(model))
        assert resumed.ledger.to_dict() == engine.ledger.to_dict()
        assert [entry["loss"] for entry in other.state.log_history if "loss" in entry] == [e["loss"] for e in logs]


def test_stages_may_change_every_n_steps(tmp_path: Path) -> None:
    rows = WhichModule(20)
    config = FracConfig(method="pfq", schedule="manual", run=RunConfig(length=3), stages="FW(4,6,8)/BW(6,6,8)")
    trainer, engine = trainer_of("mixin", rewritten_bert(config), arguments(tmp_path), rows, stage_steps=4)
    trainer.train()
    assert [row.samples for row in engine.ledger.rows] == [32, 32, 16]
    assert [row.level for row in engine.ledger.rows] == ["FW-4/BW-6", "FW-6/BW-6", "FW-8/BW-8"]
    with pytest.raises(ConfigError, match="stage_steps"):
        FracTrainCallback(rewritten_bert(), stage_steps=0)


@pytest.mark.long
def test_trainer_tells_a_schedule_how_long_the_run_is(tmp_path: Path) -> None:
    rows = WhichModule(20)  # 5 steps an epoch
    config = FracConfig(method="pfq", schedule="manual", stages="FW(4,8)/BW(6,8)")
    callback = FracTrainCallback(rewritten_bert(config))
    with pytest.raises(InputError, match="schedule='manual' divides the run, whose length Trainer knows"):
        _ = callback.engine
    trainer = Trainer(callback.model, arguments(tmp_path), train_dataset=rows, callbacks=[callback])
    trainer.train()
    assert [row.level for row in callback.engine.ledger.rows] == ["FW-4/BW-6", "FW-8/BW-8"]

    split = Tuner(rewritten_bert(config), arguments(tmp_path), train_dataset=rows, stage_steps=4)
    split.train()  # 4, 4 and 2 steps
    assert [row.level for row in split.engine.ledger.rows] == ["FW-4/BW-6", "FW-4/BW-6", "FW-8/BW-8"]

    late = config.replace(schedule=Fixed(turns=(0.6,), every=Steps(2)))
    saving = arguments(tmp_path / "late", save_strategy="steps", save_steps=7)
    whole = Tuner(rewritten_bert(late), saving, train_dataset=rows)
    whole.train()
    assert whole.engine.ledger.turning_steps == (6,)
    resumed = Tuner(rewritten_bert(late), saving, train_dataset=rows)
    resumed.train(resume_from_checkpoint=f"{tmp_path}/late/checkpoint-7")
    assert resumed.engine.ledger.to_dict() == whole.engine.ledger.to_dict()

    tokens = late.replace(**{"schedule.every": Tokens(100)})
    with pytest.raises(ConfigError, match=r"length=Tokens"):
        Tuner(rewritten_bert(tokens), arguments(tmp_path), train_dataset=rows).train()


@pytest.mark.long
def test_a_stage_may_begin_at_any_step_or_token_and_a_resumed_run_goes_on_there(tmp_path: Path) -> None:
    rows = WhichModule(20)
    clock = Fixed((Steps(6),), every=Steps(3))
    config = FracConfig(method="pfq", format="mx", stages="FW(4,8)/BW(4,8)", schedule=clock)
    saving = arguments(tmp_path, save_strategy="steps", save_steps=5)
    trainer, engine = trainer_of("mixin", rewritten_bert(config), saving, rows)
    trainer.train()
    assert engine.ledger.turning_steps == (6,) and engine.state_dict()["clock"]["steps"] == 10
    again, resumed = trainer_of("mixin", rewritten_bert(config), saving, rows)
    again.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-5")
    assert resumed.ledger.to_dict() == engine.ledger.to_dict()
    tokens = config.replace(schedule=Fixed((Tokens(400),), every=Tokens(200)))
    trainer, engine = trainer_of("callback", rewritten_bert(tokens), arguments(tmp_path / "tokens"), rows)
    trainer.train()
    (turn,) = engine.ledger.turning_steps
    assert 0 < turn < 10 and engine.state_dict()["clock"]["tokens"] > 400
    with pytest.raises(ConfigError, match="both say when"):
        FracTrainCallback(rewritten_bert(config), stage_steps=4)


class Watched(Tuner):
    """Notes with what gradient each batch arrives at the choices of the gates."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        choices = self.engine.model.training_forward.cost.choice.values()
        for choice in choices:
            choice.retain_grad()
        self.seen = [*getattr(self, "seen", []), choices]
        return loss

    def pushes(self) -> Tensor:
        return torch.cat([torch.stack([choice.grad for choice in choices], dim=1) for choices in self.seen])


@pytest.mark.parametrize("scaled", thinned([True, False], 2))
def test_the_cost_term_is_as_strong_under_accumulation(scaled: bool, tmp_path: Path) -> None:
    rows = WhichModule(10)
    config = TWO_STAGES.replace(targets=(0.02, 0.03), gate=GateConfig(control="sign"))  # above it throughout: one sign

    def pushes(batch_size: int, accumulate: int) -> Tensor:
        args = arguments(
            tmp_path, per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulate, max_steps=2
        )
        none = lambda outputs, labels, num_items_in_batch: 0 * outputs["logits"].sum()  # noqa: E731
        model = rewritten_bert(config, labels=False)
        trainer = Watched(model, args, train_dataset=rows, compute_loss_func=none)
        trainer.loss_is_scaled_for_ga = scaled
        trainer.train()
        return trainer.pushes()

    whole, parts = pushes(16, 1), pushes(4, 4)  # the second step has four samples left
    assert len(whole) == len(parts) == 20
    expected = whole[0].expand_as(whole)
    torch.testing.assert_close(whole, expected)
    torch.testing.assert_close(parts, expected)


def test_the_callback_divides_by_the_batches_of_each_step_as_trainer_does(tmp_path: Path) -> None:
    pairs = []

    class Noted(FracTrainCallback):
        def add_cost(self, loss: Tensor, mean: Tensor, weight: float, labels: Tensor | None = None) -> Tensor:
            pairs.append((weight, trainer.current_gradient_accumulation_steps))
            return super().add_cost(loss, mean, weight, labels)

    callback = Noted(rewritten_bert())
    args = arguments(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=4)
    trainer: Any = Trainer(callback.model, args, train_dataset=WhichModule(10), callbacks=[callback])
    trainer.model_accepts_loss_kwargs = False  # else losses are weighted by their labels
    trainer.train()
    assert pairs == [(4, 4)] * 4 + [(1, 1)] + [(4, 4)] * 4 + [(1, 1)]


def test_a_float_llama_trains_as_under_the_plain_trainer_with_losses_weighted_by_their_labels(tmp_path: Path) -> None:
    rows = NextWord(20)
    args = arguments(tmp_path, gradient_accumulation_steps=2, eval_strategy="epoch", optim="sgd", max_grad_norm=0.0)
    plain = Trainer(llama(), args, train_dataset=rows, eval_dataset=rows)
    plain.train()
    frac = rewritten(llama(), rows, FracConfig(method="float"))
    trainer, engine = trainer_of("mixin", frac, args, rows)
    trainer.train()
    for ours, theirs in zip(trainer.state.log_history, plain.state.log_history, strict=True):
        for name in theirs.keys() & {"loss", "eval_loss", "grad_norm"}:
            # A mean times a share of the labels is not quite a sum over their number.
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(entry["cost_loss"] == 0 and entry["cp_total_percent"] == 100 for entry in logs)
    # The ledger's mean is over the labels of the epoch, the mean of the logs over its steps.
    assert engine.ledger.rows[0].loss == pytest.approx(sum(e["loss"] for e in logs[:3]) / 3, rel=0.02)


class OneUnlabelled(NextWord):
    """Its first row has no label, as a prompt that was cut before its answer."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = super().__getitem__(index)
        return row if index else row | {"labels": torch.full_like(row["labels"], -100)}


@pytest.mark.parametrize("kind", ["mixin", "callback"])
def test_a_batch_without_labels_weighs_nothing_as_under_the_plain_trainer(kind: str, tmp_path: Path) -> None:
    rows = OneUnlabelled(4)  # 8 rows, in batches of one
    args = arguments(
        tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=4, num_train_epochs=1, optim="sgd"
    )
    plain: Any = Trainer(llama(), args, train_dataset=rows)
    plain.train()
    trainer: Any
    trainer, engine = trainer_of(kind, rewritten(llama(), rows, FracConfig(method="float")), args, rows)
    trainer.train()
    logs, theirs = ([each for each in one.state.log_history if "loss" in each] for one in (trainer, plain))
    assert [each["loss"] for each in logs] == pytest.approx([each["loss"] for each in theirs], rel=1e-4)
    assert [each["task_loss"] for each in logs] == pytest.approx([each["loss"] for each in logs], rel=1e-4)
    trained = trainer.model.state_dict()
    for name, weight in plain.model.state_dict().items():
        torch.testing.assert_close(trained[name], weight, rtol=1e-4, atol=1e-5)  # sums in another order
    (row,) = engine.ledger.rows
    assert row.samples == 8 and min(e["loss"] for e in logs) <= row.loss <= max(e["loss"] for e in logs)


def test_the_gradient_of_a_batch_without_labels_is_zero(tmp_path: Path) -> None:
    rows = OneUnlabelled(4)
    config = FracConfig(method="static", precision="FW-8/BW-8")
    trainer: Any = Tuner(rewritten(llama(), rows, config), arguments(tmp_path), train_dataset=rows)
    model = trainer.model.train()
    loss = model(**batch(rows, 1), num_items_in_batch=torch.tensor(10)).loss
    loss.backward()
    assert loss == 0
    assert all(bool((p.grad == 0).all()) for p in model.parameters() if p.grad is not None)
    assert model.get_input_embeddings().weight.grad is not None


def test_tied_weights_are_saved_and_loaded_and_the_checkpoint_is_a_saved_model(tmp_path: Path, caplog: Any) -> None:
    rows = NextWord(8)
    model = rewritten(gpt2(), rows)
    args = arguments(tmp_path, num_train_epochs=1, save_strategy="epoch")
    trainer, _ = trainer_of("callback", model, args, rows)
    trainer.train()
    checkpoint = tmp_path / "checkpoint-2"
    loaded = FracModel.from_pretrained(checkpoint, model=gpt2())
    assert_same(weights(loaded), weights(model))
    again = rewritten(gpt2(), rows)
    other, _ = trainer_of("mixin", again, arguments(tmp_path, num_train_epochs=2), rows)
    transformers.utils.logging.enable_propagation()
    other.train(resume_from_checkpoint=True)
    transformers.utils.logging.disable_propagation()
    assert "missing keys" not in caplog.text and "unexpected keys" not in caplog.text
    restored = again.restore()
    assert restored.get_parameter("lm_head.weight") is restored.get_parameter("transformer.wte.weight")
    other.save_model(str(tmp_path / "saved"))
    assert_same(weights(FracModel.from_pretrained(tmp_path / "saved", model=gpt2())), weights(again))


def test_label_smoothing_model_init_and_half_precision_go_with_the_mixin(tmp_path: Path) -> None:
    rows = WhichModule(8)
    args = arguments(tmp_path, label_smoothing_factor=0.1, bf16=True, gradient_accumulation_steps=2, num_train_epochs=1)
    make = lambda: rewritten_bert(labels=False)  # noqa: E731
    trainer = Tuner(None, args, train_dataset=rows, model_init=make)
    trainer.train()
    (entry,) = (entry for entry in trainer.state.log_history if "loss" in entry)
    assert entry["loss"] == pytest.approx(entry["task_loss"] + entry["cost_loss"], rel=1e-4)
    assert entry["task_loss"] == pytest.approx(0.69, abs=0.1)  # log 2: two classes, before anything was learnt
    assert trainer.engine.ledger.samples == 16


def test_generation_and_pipelines_go_through_the_original_class(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    rows = WhichModule(8)
    model = rewritten_bert()
    trainer, _ = trainer_of("mixin", model, arguments(tmp_path, num_train_epochs=1), rows)
    trainer.train()
    core = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "mean": 3, "archive": 4}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]")
    plain: Any = model.restore().eval()
    classify = transformers.pipeline("text-classification", model=plain, tokenizer=tokenizer)
    (answer,) = classify("mean archive")
    logits = plain(torch.tensor([[3, 4]]), torch.ones(1, 2)).logits.softmax(1)
    assert answer["score"] == pytest.approx(logits.max().item(), rel=1e-5)

    words = NextWord(4)
    writer = rewritten(gpt2(), words)
    trainer, _ = trainer_of("mixin", writer, arguments(tmp_path), words)
    prompt = torch.tensor([[5, 6]])
    settings: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    writer.eval()
    trained: Any = trainer.model
    plain = writer.restore()
    made = trained.generate(prompt, **settings)
    assert torch.equal(made, plain.generate(prompt, **settings)) and made.shape[0] == 1


def test_bases_in_the_wrong_order_and_plain_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"FracTrainMixin, Trainer\)"):
        type("Wrong", (Trainer, FracTrainMixin), {})
    rows = WhichModule(4)
    with pytest.raises(ConfigError, match="fractrainify"):
        Tuner(bert(), arguments(tmp_path), train_dataset=rows)
    callback = FracTrainCallback(rewritten_bert())
    with pytest.raises(ConfigError, match="restore"):
        fractrainify(callback.model, example_kwargs=batch(rows), check=False)
    trainer = Trainer(bert(), arguments(tmp_path), train_dataset=rows, callbacks=[callback])
    with pytest.raises(ConfigError, match=r"callback\.model"):
        trainer.train()


def test_sharding_by_trainer_names_what_shards_a_rewritten_model(tmp_path: Path) -> None:
    rows: Any = WhichModule(4)
    args: Any = arguments(tmp_path)
    args.fsdp = True  # set later, because TrainingArguments(fsdp=True) changes the environment of this process
    callback = FracTrainCallback(rewritten_bert())
    with pytest.raises(ConfigError, match=r"fractrain_fx\.distributed\.fully_shard"):
        Tuner(rewritten_bert(), args, train_dataset=rows)
    with pytest.raises(ConfigError, match=r"fractrain_fx\.distributed\.fully_shard"):
        callback.on_init_end(args, None, None)  # type: ignore[arg-type]


def test_a_trainer_without_the_mixin_is_told_to_write_it_and_one_around_an_engine_is_left_alone(tmp_path: Path) -> None:
    rows = WhichModule(4)
    args = arguments(tmp_path, max_steps=1)
    model = rewritten_bert()
    for given in (model, nn.Sequential(model)):
        with pytest.raises(
            ConfigError, match=r"class MyTrainer\(FracTrainMixin, Trainer\).*FracTrainCallback\(model\)"
        ):
            Trainer(given, args, train_dataset=rows)
    Trainer(bert(), args, train_dataset=rows).train()

    class Own(Trainer):
        """Brings the cost term itself."""

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return engine.loss(model(**inputs).loss)

    engine = Engine(model)
    with pytest.raises(ConfigError, match="FracTrainMixin"):
        Trainer(model, args, train_dataset=rows).train()
    args.remove_unused_columns = False  # Trainer reads their names from the signature of forward
    Own(model, args, train_dataset=rows).train()
    assert engine.steps == 1


def test_a_trainer_that_drops_the_cost_term_is_told_what_to_write(tmp_path: Path) -> None:
    rows = WhichModule(4)

    class Own(Tuner):
        """Its own loss, and no cost."""

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return F.cross_entropy(model(**inputs)["logits"], inputs["labels"])

    class Forgets(Tuner):
        """Lets the cost term be added, and trains on something else."""

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            _, outputs = super().compute_loss(model, inputs, return_outputs=True)
            return F.cross_entropy(outputs["logits"], inputs["labels"])

    class Adds(Own):
        """Its own loss, with the cost."""

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return self.engine.loss(super().compute_loss(*args, **kwargs))

    args = arguments(tmp_path, max_steps=1)
    for kind, words in ((Own, r"self\.engine\.loss\(loss\)"), (Forgets, "dropped the cost term")):
        with pytest.raises(CostTermError, match=words):
            kind(rewritten_bert(), args, train_dataset=rows).train()
    Adds(rewritten_bert(), args, train_dataset=rows).train()

    callback = FracTrainCallback(rewritten_bert(labels=False))
    smoothing = arguments(tmp_path, max_steps=1, label_smoothing_factor=0.1)
    with pytest.raises(CostTermError, match="FracTrainMixin"):
        Trainer(callback.model, smoothing, train_dataset=rows, callbacks=[callback]).train()


def test_checkpoints_of_another_trainer_and_bad_losses_are_errors(tmp_path: Path) -> None:
    rows = WhichModule(4)
    args = arguments(tmp_path, num_train_epochs=1, save_strategy="epoch")
    Trainer(bert(), args, train_dataset=rows).train()
    with pytest.raises(RunError, match="no state of FracTrain"):
        Tuner(rewritten_bert(), arguments(tmp_path), train_dataset=rows).train(resume_from_checkpoint=True)
    spoilt = bert()
    with torch.no_grad():
        spoilt.classifier.bias.fill_(float("nan"))  # type: ignore[union-attr, operator]
    model = rewritten_bert()
    model.load_state_dict(spoilt.state_dict())
    with pytest.raises(NonFiniteLossError, match="step 1 of epoch 1"):
        Tuner(model, arguments(tmp_path), train_dataset=rows).train()


def test_a_checkpoint_that_a_later_callback_asks_for_is_whole(tmp_path: Path) -> None:
    class SaveNow(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = state.global_step == 1

    rows = WhichModule(8)
    model = rewritten_bert()
    trainer, engine = trainer_of("mixin", model, arguments(tmp_path), rows)
    trainer.add_callback(SaveNow())
    trainer.train()
    again = rewritten_bert()
    other, resumed = trainer_of("mixin", again, arguments(tmp_path), rows)
    other.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-1")
    assert_same(weights(again), weights(model))
    assert resumed.ledger.to_dict() == engine.ledger.to_dict()


def test_scores_of_generated_text_are_said_to_be_of_the_float_model(tmp_path: Path) -> None:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    config = transformers.T5Config(**sizes | {"decoder_start_token_id": 0}, pad_token_id=0, eos_token_id=1)
    rows = [{"input_ids": torch.arange(2, 8), "labels": torch.arange(2, 6)} for _ in range(4)]
    example = {name: torch.stack([row[name] for row in rows[:2]]) for name in rows[0]}
    model = fractrainify(
        transformers.T5ForConditionalGeneration(config), config=TWO_STAGES, example_kwargs=example, check=False
    )
    model.calibrate([example])

    class Summarizer(FracTrainMixin, transformers.Seq2SeqTrainer):
        pass

    quiet: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    args = transformers.Seq2SeqTrainingArguments(str(tmp_path), predict_with_generate=True, **quiet)
    same = lambda predicted: {"same": float((predicted.predictions[:, :2] == 3).mean())}  # noqa: E731
    trainer: Any = Summarizer(model, args, train_dataset=rows, eval_dataset=rows, compute_metrics=same)
    with pytest.warns(
        FracTrainWarning, match=r"float T5ForConditionalGeneration.*every score of them, are not at"
    ) as told:
        assert {"eval_loss", "eval_same"} <= trainer.evaluate().keys()
    assert len([each for each in told if each.category is FracTrainWarning]) == 1


@pytest.mark.long
def test_activation_checkpointing_trains_to_the_same_weights(tmp_path: Path) -> None:
    rows = WhichModule(8)
    found = []
    trainer: Any
    for changes in ({}, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}):
        model = rewritten_bert()
        trainer = Tuner(model, arguments(tmp_path, num_train_epochs=1, **changes), train_dataset=rows)
        trainer.train()
        assert model.is_gradient_checkpointing == trainer.model.is_activation_checkpointing == bool(changes)
        found.append(weights(model))
    assert_same(*found)
    with pytest.raises(ConfigError, match="use_reentrant"):
        Tuner(
            model,
            arguments(tmp_path, activation_checkpointing=True, activation_checkpointing_kwargs={"use_reentrant": True}),
        ).train()


@pytest.mark.parametrize("kind", thinned(["mixin", "callback"], 2))
def test_logs_have_the_level_beside_the_stage_and_at_the_end_the_stages_but_not_for_those_that_take_numbers(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, seen = WhichModule(20), []

    class Reporter(TrainerCallback):
        def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
            seen.append(dict(logs))

    args = arguments(tmp_path, logging_steps=5, save_strategy="epoch", eval_strategy="epoch")
    config = FracConfig(method="pfq", schedule="manual", run=RunConfig(length=2), stages="FW(4,8)/BW(6,8)")
    trainer: Any
    trainer, _ = trainer_of(kind, rewritten_bert(config), args, rows)
    handler = trainer.callback_handler.callbacks
    handler.insert(0, Reporter())
    trainer.train()
    losses = [entry for entry in trainer.state.log_history if "task_loss" in entry]
    assert [(entry["stage"], entry["level"]) for entry in losses] == [(1, "FW-4/BW-6"), (2, "FW-8/BW-8")]
    assert trainer.state.log_history[-1]["stages"] == "FW-4/BW-6 for 50 %, FW-8/BW-8 for 50 % of the samples"
    assert not any(isinstance(value, str) for logs in seen for value in logs.values())
    printed = capsys.readouterr().out
    assert "'level': 'FW-8/BW-8'" in printed and "'stages': 'FW-4/BW-6 for 50 %" in printed
    assert [str(op.precision) for op in trainer.model.ops][1] == "FW-8/BW-8" and trainer.model.stage.number == 2
    assert summarize(trainer.model).to_dict()["model"] == "BertForSequenceClassification"
    with pytest.raises(AttributeError, match="nothing"):
        _ = trainer.model.nothing
    trainer.save_model(str(tmp_path / "saved"))
    measured = trainer.state.log_history[-2]["eval_loss"]
    assert f"| eval_loss | {measured:g} |" in (tmp_path / "saved" / "README.md").read_text()
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert torch.equal(loaded.state_dict()["classifier.weight"], trainer.model.state_dict()["classifier.weight"])


@pytest.mark.parametrize("kind", thinned(["mixin", "callback"], 2))
def test_a_callback_watches_the_numbers_of_a_training(kind: str, tmp_path: Path) -> None:
    rows = WhichModule(20)
    trainer, _ = trainer_of(kind, rewritten_bert(), arguments(tmp_path, num_train_epochs=1), rows)
    callback = WatchCallback(every=2)
    trainer.add_callback(callback)
    trainer.train()
    assert callback.watched is not None and callback.watched.steps > 2
    assert [step.step for step in read_steps(tmp_path / "numerics.jsonl")] == [1, 3, 5]
    assert [record.step for record in callback.watched.records] == [3, 5]
    assert callback.watched.records[0].commonest is not None  # FracTrain has gates


class FailsOnce:
    """Ends a training at a batch, before its backward pass, as running out of memory would."""

    def __init__(self, model: FracModel, batch: int) -> None:
        self._left = batch
        model.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self._left -= 1
        if not self._left:
            raise RuntimeError("out of memory")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["mixin", "callback"])
def test_a_training_that_failed_goes_on_in_the_same_trainer_and_is_watched_on(kind: str, tmp_path: Path) -> None:
    rows = WhichModule(20)  # 5 steps an epoch
    args = arguments(tmp_path, num_train_epochs=1, save_strategy="steps", save_steps=2)
    whole, engine = trainer_of(kind, rewritten_bert(), args, rows)
    whole.add_callback(WatchCallback(every=2, out=tmp_path / "whole"))
    whole.train()

    model = rewritten_bert()
    trainer, same = trainer_of(kind, model, args, rows)
    trainer.add_callback(WatchCallback(every=2))
    FailsOnce(model, 4)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    trainer.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-2")
    names = ("loss", "task_loss", "cost_loss")
    ours, theirs = (
        [[each[name] for name in names] for each in one.state.log_history if "loss" in each] for one in (trainer, whole)
    )
    assert ours == theirs
    assert_same(weights(model), weights(whole.model))  # type: ignore[arg-type]
    assert same.ledger.to_dict() == engine.ledger.to_dict()
    mine, others = (list(read_steps(folder / "numerics.jsonl")) for folder in (tmp_path, tmp_path / "whole"))
    assert [step.step for step in mine] == [1, 3, 5]
    assert [step.to_dict() for step in mine] == [step.to_dict() for step in others]


def test_a_model_whose_training_failed_is_trained_and_watched_by_another_trainer(tmp_path: Path) -> None:
    rows, model = WhichModule(20), rewritten_bert()
    args = arguments(tmp_path, num_train_epochs=1)
    first, _ = trainer_of("mixin", model, args, rows)
    first.add_callback(WatchCallback(every=1))
    FailsOnce(model, 2)
    with pytest.raises(RuntimeError, match="out of memory"):
        first.train()
    again, watching = trainer_of("mixin", model, args, rows)[0], WatchCallback(every=1, out=tmp_path / "again")
    again.add_callback(watching)
    again.train()
    assert [step.step for step in read_steps(tmp_path / "again" / "numerics.jsonl")] == [1, 2, 3, 4, 5]
    again.add_callback(WatchCallback())
    with pytest.raises(ConfigError, match="being watched already"):
        again.train()
