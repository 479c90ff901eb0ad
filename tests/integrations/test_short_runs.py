"""The four trainers as a person writes them, with evaluation before and between, and with nothing but defaults."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import transformers
from lightning.pytorch.callbacks import StochasticWeightAveraging
from timm.optim import create_optimizer_v2
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from fractrain_fx import Engine, FracModel
from fractrain_fx.errors import FracTrainWarning
from fractrain_fx.integrations.huggingface import FracTrainMixin
from fractrain_fx.integrations.lightning import FracTrainCallback
from fractrain_fx.integrations.timm import FracTrainTask
from tests.build import made_once, rewritten
from tests.integrations.digits import digits
from tests.integrations.stdlib_text import VOCABULARY, WhichModule
from tests.models import thinned
from tests.training.tiny import TinyNet


@made_once
def net() -> FracModel:
    torch.manual_seed(3)
    return rewritten(TinyNet(), torch.rand(2, 3, 8, 8))


def loaders() -> tuple[Any, Any]:
    return DataLoader(digits(80), batch_size=16), DataLoader(digits(32, offset=1000), batch_size=16)


def own_loop(epochs: int, folder: Path) -> Engine:
    model, (train, test) = net(), loaders()
    engine = Engine(model, epochs=epochs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def evaluate() -> float:
        model.eval()
        with torch.no_grad():
            return sum(float((model(x).argmax(1) == y).sum()) for x, y in test)

    evaluate()
    for _ in range(epochs):
        model.train()
        for x, y in train:
            engine.loss(F.cross_entropy(model(x), y)).backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.end_epoch()
        evaluate()
    return engine


class Classifier(lightning.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("accuracy", (self.model(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def lightnings(epochs: int, folder: Path, *more: Any) -> Engine:
    callback, module = FracTrainCallback(), Classifier(net())
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", callbacks=[callback, *more], default_root_dir=folder, logger=False
    )
    trainer.validate(module, loaders()[1], verbose=False)
    trainer.fit(module, *loaders())
    return callback.engine


class MyTrainer(FracTrainMixin, Trainer):
    pass


def hugging_face(epochs: int, folder: Path, **changes: Any) -> Engine:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    bert = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, vocab_size=VOCABULARY))
    rows: Any = WhichModule(16)
    args = TrainingArguments(
        str(folder),
        num_train_epochs=epochs,
        use_cpu=True,
        report_to=[],
        eval_strategy="epoch",
        eval_on_start=True,
        **changes,
    )
    trainer = MyTrainer(rewritten(bert), args, train_dataset=rows, eval_dataset=rows)
    trainer.evaluate()
    trainer.train()
    return trainer.engine


def timms(epochs: int, folder: Path) -> Engine:
    model, (train, test) = net(), loaders()
    task = FracTrainTask(model, epochs=epochs, verbose=False)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.05)

    @torch.no_grad()
    def validate() -> None:
        task.eval()
        for x, y in test:
            task(x, y)

    validate()
    for _ in range(epochs):
        task.train()
        for x, y in train:
            task(x, y)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
        task.end_epoch()
        validate()
    return task.engine


TRAINERS = [own_loop, lightnings, hugging_face, timms]


@pytest.mark.parametrize("epochs", thinned([3, 1, 6], 3))
@pytest.mark.parametrize("train", TRAINERS)
def test_a_short_run_reaches_its_last_stage(
    train: Callable[[int, Path], Engine], epochs: int, tmp_path: Path, recwarn: Any
) -> None:
    engine = train(epochs, tmp_path)
    assert len(engine.ledger.rows) == epochs
    assert (engine.stage, len(engine.levels)) == (3, 4)
    assert engine.ledger.rows[-1].pure[-1].level == f"cp {engine.levels[-1]:g} %"
    assert engine.schedule.startswith(("the length of the run", "Algorithm 1, with the last stage begun"))
    told = [str(each.message) for each in recwarn if issubclass(each.category, FracTrainWarning)]
    assert len(told) == 1 and "provisional" in told[0]


@pytest.mark.long
def test_one_epoch_is_divided_by_steps_where_the_trainer_counts_them(tmp_path: Path) -> None:
    rows = lightnings(1, tmp_path / "lightning").ledger.rows[0].pure  # 5 steps
    assert [(row.stage, row.step) for row in rows] == [(0, 1), (1, 2), (2, 3), (3, 5)]
    engine = hugging_face(1, tmp_path / "hf", per_device_train_batch_size=2)
    assert [(row.stage, row.step) for row in engine.ledger.rows[0].pure] == [(0, 4), (1, 8), (2, 12), (3, 16)]


def test_a_trainer_that_counts_steps_only_reaches_the_last_stage_too(tmp_path: Path) -> None:
    engine = hugging_face(1, tmp_path, max_steps=12, per_device_train_batch_size=4)  # of 8 steps an epoch
    assert engine.stage == 3 and [row.step for row in engine.ledger.rows] == [8, 12]


def test_the_pass_of_weight_averaging_is_neither_trained_nor_counted(tmp_path: Path) -> None:
    engine = lightnings(3, tmp_path, StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1))
    assert [row.samples for row in engine.ledger.rows] == [80, 80, 80] and engine.stage == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error", FracTrainWarning)
        assert engine.ledger.stages.startswith("stages: cp 2.90 % for ")
