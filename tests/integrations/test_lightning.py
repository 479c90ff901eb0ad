"""Lightning's own Trainer on scikit-learn's digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from fractrain_fx import Engine, Fixed, FracConfig, FracModel, RunConfig, Steps
from fractrain_fx.errors import ConfigError, CostTermError
from fractrain_fx.integrations.lightning import FracTrainCallback, WatchCallback
from fractrain_fx.numerics import read_steps
from tests import build
from tests.build import made_once, paper
from tests.integrations.digits import digits
from tests.training.tiny import TinyNet

TWO_STAGES = paper(targets=(1.0, 3.0), schedule="manual", run=RunConfig(length=2))


@made_once
def rewritten(config: FracConfig = TWO_STAGES) -> FracModel:
    torch.manual_seed(3)
    return build.rewritten(TinyNet(), torch.rand(2, 3, 8, 8), config=config)


class Digits(lightning.LightningModule):
    """As anybody would write it: nothing in here knows of FracTrain."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": F.cross_entropy(self.model(batch[0]), batch[1])}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("accuracy", (self.model(batch[0]).argmax(1) == batch[1]).float().mean())

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)


def trainer_of(callback: Any, out: Path, epochs: int = 2, **options: Any) -> lightning.Trainer:
    quiet: dict[str, Any] = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "accelerator": "cpu",
    }
    usual: dict[str, Any] = {
        "max_epochs": epochs,
        "default_root_dir": out,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": False,
    }
    callbacks = [callback, *options.pop("callbacks", [])]
    return lightning.Trainer(callbacks=callbacks, **(quiet | usual | options))


def loaders(count: int = 80) -> tuple[Any, Any]:
    return DataLoader(digits(count), batch_size=16), DataLoader(digits(200, offset=1000), batch_size=100)


class Seeded(Digits):
    """Lightning keeps no random state, so every batch brings its own."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(100 * self.current_epoch + batch_idx)


def test_digits_in_two_epochs_and_a_resumed_run_equals_one_that_was_left_alone(tmp_path: Path) -> None:
    # Five batches an epoch: optimizer steps of 2, 2 and 1. Step 3 ends the first epoch; after step 5 one batch is left,
    # for which Lightning begins the data again, so that there only the counts are the same.
    by_step = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    module, callback = Seeded(rewritten()), FracTrainCallback()
    options = {"accumulate_grad_batches": 2}
    whole = trainer_of(callback, tmp_path, callbacks=[by_step], enable_checkpointing=True, **options)
    whole.fit(module, loaders()[0])
    rows = callback.engine.ledger.rows
    assert [(row.stage, row.samples) for row in rows] == [(0, 80), (1, 80)]

    for step in (5, 3):
        again, resumed = Seeded(rewritten()), FracTrainCallback()
        other = trainer_of(resumed, tmp_path, **options)
        other.fit(again, loaders()[0], ckpt_path=f"{tmp_path}/step={step}.ckpt", weights_only=False)
        assert [(row.stage, row.samples) for row in resumed.engine.ledger.rows] == [(0, 80), (1, 80)]
    assert again.losses == module.losses[5:]
    assert resumed.engine.ledger.to_dict() == callback.engine.ledger.to_dict()
    mine, theirs = again.state_dict(), module.state_dict()
    assert [name for name in theirs if not torch.equal(mine[name], theirs[name])] == []


def test_a_checkpoint_made_by_validation_has_the_epoch_closed(tmp_path: Path) -> None:
    kept = ModelCheckpoint(tmp_path, "{epoch}", monitor="accuracy", save_top_k=-1)
    module, callback = Digits(rewritten()), FracTrainCallback()
    trainer_of(callback, tmp_path, callbacks=[kept], enable_checkpointing=True).fit(module, *loaders())
    saved = torch.load(tmp_path / "epoch=0.ckpt", weights_only=False)["callbacks"]
    (state,) = (each["engine"] for name, each in saved.items() if "FracTrain" in name)
    assert state["stage"] == 1 and len(state["ledger"]["epochs"]) == 1
    again, resumed = Digits(rewritten()), FracTrainCallback()
    other = trainer_of(resumed, tmp_path)
    other.fit(again, *loaders(), ckpt_path=f"{tmp_path}/epoch=0.ckpt", weights_only=False)
    assert [(row.stage, row.samples) for row in resumed.engine.ledger.rows] == [(0, 80), (1, 80)]


@pytest.mark.long
def test_the_loss_holds_the_cost_and_the_digits_are_learnt(tmp_path: Path) -> None:
    module, callback = Digits(rewritten()), FracTrainCallback()
    # Half as long, accuracies of several seeds lie around 0.5.
    trainer = trainer_of(callback, tmp_path, epochs=16)
    trainer.fit(module, DataLoader(digits(640), batch_size=16), loaders()[1])
    shown = {name: float(value) for name, value in trainer.logged_metrics.items()}
    assert module.losses[-1] == pytest.approx(shown["task_loss"] + shown["cost_loss"], rel=1e-4)
    assert 0 < shown["cp_percent"] < shown["cp_total_percent"] < 100 and shown["stage"] == 2
    assert shown["accuracy"] > 0.5  # chance is 0.1
    assert "training_step" not in vars(module)  # the wrapper is gone


def test_a_loss_line_of_the_modules_own_is_not_added_to(tmp_path: Path) -> None:
    class Own(Digits):
        def __init__(self, model: FracModel) -> None:
            super().__init__(model)
            self.engine = Engine(model)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": self.engine.loss(super().training_step(batch, batch_idx)["loss"])}

    modules = Digits(rewritten()), Own(rewritten())
    for module in modules:
        engine = getattr(module, "engine", None)
        torch.manual_seed(0)
        trainer_of(FracTrainCallback(engine), tmp_path, accumulate_grad_batches=2).fit(module, loaders()[0])
    assert modules[0].losses == modules[1].losses


def test_manual_optimization_needs_the_loss_line(tmp_path: Path) -> None:
    class Manual(Digits):
        line = True

        def __init__(self, model: FracModel) -> None:
            super().__init__(model)
            self.automatic_optimization = False
            self.engine = Engine(model)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            loss = F.cross_entropy(self.model(batch[0]), batch[1])
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.engine.loss(loss) if self.line else loss)
            optimizer.step()

        def on_train_batch_end(self, *_: Any) -> None: ...

    module = Manual(rewritten())
    trainer_of(FracTrainCallback(module.engine), tmp_path).fit(module, loaders()[0])
    assert [row.samples for row in module.engine.ledger.rows] == [80, 80]
    module.line = False
    with pytest.raises(CostTermError, match=r"Manual\.training_step.*self\.engine\.loss"):
        trainer_of(FracTrainCallback(module.engine), tmp_path).fit(module, loaders()[0])


def test_what_drops_the_cost_term_is_told_what_to_write(tmp_path: Path) -> None:
    class Forgets(Digits):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = F.cross_entropy(self.model(batch[0]), batch[1])
            trainer: Any = self.trainer
            trainer.callbacks[0].engine.loss(loss)
            return loss

    with pytest.raises(CostTermError, match=r"Forgets\.training_step dropped the cost term"):
        trainer_of(FracTrainCallback(), tmp_path).fit(Forgets(rewritten()), loaders()[0])

    class Nothing(Digits):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.model(batch[0])

    with pytest.raises(CostTermError, match="return the loss"):
        trainer_of(FracTrainCallback(), tmp_path).fit(Nothing(rewritten()), loaders()[0])
    with pytest.raises(ConfigError, match="holds 0 rewritten models"):
        trainer_of(FracTrainCallback(), tmp_path).fit(Digits(TinyNet()), loaders()[0])


def test_a_batch_may_be_skipped(tmp_path: Path) -> None:
    class Skips(Digits):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            self.losses += [float(outputs["loss"])] if outputs else []

    callback, module = FracTrainCallback(), Skips(rewritten())
    trainer_of(callback, tmp_path).fit(module, loaders()[0])
    assert len(module.losses) == 2 * 4 and len(callback.engine.ledger.rows) == 2


def test_stages_may_change_every_n_steps(tmp_path: Path) -> None:
    config = FracConfig(method="pfq", schedule="manual", run=RunConfig(length=3), stages="FW(4,6,8)/BW(6,6,8)")
    callback = FracTrainCallback(stage_steps=4)
    trainer_of(callback, tmp_path).fit(Digits(rewritten(config)), loaders()[0])
    assert [row.samples for row in callback.engine.ledger.rows] == [64, 64, 32]
    assert [row.level for row in callback.engine.ledger.rows] == ["FW-4/BW-6", "FW-6/BW-6", "FW-8/BW-8"]
    with pytest.raises(ConfigError, match="stage_steps"):
        FracTrainCallback(stage_steps=0)


def test_the_trainer_tells_a_schedule_how_long_the_run_is(tmp_path: Path) -> None:
    config = FracConfig(method="pfq", schedule="manual", stages="FW(4,8)/BW(6,8)")
    late = config.replace(schedule=Fixed(turns=(0.6,), every=Steps(2)))
    for each, options, levels in (
        (config, {}, ["FW-4/BW-6", "FW-8/BW-8"]),
        (config, {"stage_steps": 4}, ["FW-4/BW-6", "FW-4/BW-6", "FW-8/BW-8"]),
        (late, {}, ["FW-4/BW-6", "FW-8/BW-8"]),
    ):
        callback = FracTrainCallback(**options)  # type: ignore[arg-type]
        trainer_of(callback, tmp_path).fit(Digits(rewritten(each)), loaders()[0])
        assert [row.level for row in callback.engine.ledger.rows] == levels
    assert callback.engine.ledger.turning_steps == (6,)
    with pytest.raises(ConfigError, match=r"run\.length="):
        trainer_of(FracTrainCallback(), tmp_path, max_epochs=-1).fit(Digits(rewritten(config)), loaders()[0])


def test_a_stage_may_begin_at_any_step(tmp_path: Path) -> None:
    config = FracConfig(method="pfq", stages="FW(4,8)/BW(6,8)", schedule=Fixed(turns=(Steps(6),), every=Steps(3)))
    callback = FracTrainCallback()
    trainer_of(callback, tmp_path).fit(Digits(rewritten(config)), loaders()[0])
    assert callback.engine.ledger.turning_steps == (6,) and callback.engine.state_dict()["clock"]["steps"] == 10
    with pytest.raises(ConfigError, match="both say when"):
        trainer_of(FracTrainCallback(stage_steps=4), tmp_path).fit(Digits(rewritten(config)), loaders()[0])


@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
def test_a_fit_without_the_callback_is_refused_and_a_validation_is_not(name: str, tmp_path: Path) -> None:
    library = pytest.importorskip(name)

    class Plain(library.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        training_step, configure_optimizers = Digits.training_step, Digits.configure_optimizers
        validation_step = Digits.validation_step

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    trainer = library.Trainer(max_epochs=1, default_root_dir=tmp_path, enable_checkpointing=False, **quiet)
    trainer.validate(Plain(rewritten()), loaders()[1], verbose=False)
    with pytest.raises(ConfigError, match=r"callbacks=\[FracTrainCallback\(\)\]"):
        trainer.fit(Plain(rewritten()), *loaders())


def test_a_callback_watches_the_numbers_of_a_training(tmp_path: Path) -> None:
    callback = WatchCallback(every=4, as_if="mxfp4")
    trainer_of(FracTrainCallback(), tmp_path, epochs=1, callbacks=[callback]).fit(Digits(rewritten()), loaders()[0])
    assert callback.watched is not None
    assert [step.step for step in read_steps(tmp_path / "numerics.jsonl")] == [1, 5]
    assert {each.as_if for each in callback.watched.records[0].operands} == {"", "mxfp4"}


class Silent(FracTrainCallback):
    """Is not told of exceptions."""

    def on_exception(self, *_: Any) -> None: ...


class SilentWatch(WatchCallback):
    """Is not told of exceptions."""

    def on_exception(self, *_: Any) -> None: ...


@pytest.mark.parametrize("told", [True, False])
def test_a_module_whose_fit_failed_is_fitted_and_watched_as_a_new_one(told: bool, tmp_path: Path) -> None:
    class Fails(Digits):
        batch: int | None = 1

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = super().training_step(batch, batch_idx)
            if batch_idx == self.batch:
                raise RuntimeError("bad batch")
            return output

    def fit(module: Fails, main: Any, watching: WatchCallback) -> list[float]:
        module.losses = []
        torch.manual_seed(0)
        trainer_of(main, tmp_path, epochs=1, callbacks=[watching]).fit(module, loaders()[0])
        return module.losses

    fresh = Fails(rewritten())
    fresh.batch = None
    losses = fit(fresh, FracTrainCallback(), WatchCallback(every=1, out=tmp_path / "fresh"))

    module = Fails(rewritten())
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(RuntimeError, match="bad batch"):
        fit(module, *((FracTrainCallback(), WatchCallback(every=1)) if told else (Silent(), SilentWatch(every=1))))
    assert ("training_step" in vars(module)) != told
    module.batch = None
    module.load_state_dict(before)
    assert fit(module, FracTrainCallback(), WatchCallback(every=1, out=tmp_path / "again")) == losses
    assert "training_step" not in vars(module)
    again, first = (list(read_steps(tmp_path / name / "numerics.jsonl")) for name in ("again", "fresh"))
    assert [step.to_dict() for step in again] == [step.to_dict() for step in first]


def test_an_engine_whose_fit_failed_between_loss_and_backward_trains_on(tmp_path: Path) -> None:
    class Fails(Digits):
        fails = True

        def __init__(self, model: FracModel) -> None:
            super().__init__(model)
            self.engine = Engine(model)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.engine.loss(super().training_step(batch, batch_idx)["loss"])
            if self.fails and batch_idx:
                raise RuntimeError("bad batch")
            return {"loss": loss}

    module = Fails(rewritten(TWO_STAGES.replace(schedule=Fixed(turns=(Steps(6),), every=Steps(2)))))
    with pytest.raises(RuntimeError, match="bad batch"):
        trainer_of(FracTrainCallback(module.engine), tmp_path).fit(module, loaders()[0])
    module.fails = False
    trainer_of(FracTrainCallback(module.engine), tmp_path).fit(module, loaders()[0])
    assert module.engine.ledger.turning_steps == (6,) and module.engine.ledger.rows[-1].samples == 80


def test_a_resumed_fit_counts_watched_steps_on(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    watching = WatchCallback(every=3)
    trainer_of(FracTrainCallback(), tmp_path, epochs=2, callbacks=[watching, saving], enable_checkpointing=True).fit(
        Digits(rewritten()), loaders()[0]
    )
    assert [step.step for step in read_steps(tmp_path / "numerics.jsonl")] == [1, 4, 7, 10]  # 5 batches an epoch
    again = WatchCallback(every=3)
    path = f"{tmp_path}/epoch=0.ckpt"
    other = trainer_of(FracTrainCallback(), tmp_path, epochs=2, callbacks=[again])
    other.fit(Digits(rewritten()), loaders()[0], ckpt_path=path, weights_only=False)
    assert [step.step for step in read_steps(tmp_path / "numerics.jsonl")] == [1, 4, 7, 10]
    assert again.watched is not None and again.watched.steps == 10
