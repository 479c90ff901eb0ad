"""Settings survive YAML, and refuse what means nothing."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from jsonargparse import ArgumentParser

from fractrain_fx.config import (
    CostTargets,
    Cyclic,
    Fixed,
    FracConfig,
    GateConfig,
    LossPlateau,
    Manual,
    Pin,
    Precision,
    RunConfig,
    Schedule,
    Steps,
)
from fractrain_fx.errors import ConfigError
from fractrain_fx.training.flags import add_flags, given_settings, settings_of
from fractrain_fx.training.settings import RunSettings, TrainSettings
from fractrain_fx.zoo.recipe import load_recipe


def parsed(*flags: str) -> dict[str, Any]:
    parser = ArgumentParser()
    add_flags(parser)
    return dict(parser.parse_args(list(flags)).as_dict())


def given(*flags: str) -> dict[str, Any]:
    return given_settings(parsed(*flags))


def test_every_setting_can_be_set_by_its_dotted_name() -> None:
    sets = ["schedule.every=10 steps", "schedule.turns=[0.5, 0.7, 30 steps]", "gate_lr=peak", "run.backend=plain"]
    sets += ["eps=1e-6", "betas=[0.8, 0.9]", "targets.saturate=true", "mixed_precision=no", "gate.beta=2e-3"]
    sets += ["pins=['depthwise=FW-8/BW-16']", "schedule=fixed", "optimizer=adam"]
    flags = ["--targets", "2", "3", *(part for each in sets for part in ("--set", each))]
    settings = RunSettings.from_dict(given(*flags))
    frac, loop = settings.frac, settings.train
    assert frac.schedule == Fixed((0.5, 0.7, Steps(30)), every=Steps(10))
    assert frac.targets == CostTargets((2.0, 3.0), saturate=True) and frac.pins[0].pattern == "depthwise"
    assert (frac.gate.beta, frac.run.backend) == (2e-3, "plain")
    assert (loop.gate_lr, loop.eps, loop.betas, loop.mixed_precision) == ("peak", 1e-6, (0.8, 0.9), "no")


@pytest.mark.parametrize(
    ("word", "text", "schedule"),
    [
        ("cyclic", "schedule.cycles=2", Cyclic(2)),
        ("manual", "schedule.every=1 step", Manual(every=Steps(1))),
        ("auto", "schedule.epsilon=0.5", LossPlateau(0.5)),
        ("fixed", "schedule.turns=[0.25,0.5,0.75]", Fixed((0.25, 0.5, 0.75))),
        (None, "schedule={kind: fixed, turns: [0.5]}", Fixed((0.5,))),
        (None, "schedule={kind: auto, epsilon: 1e-2}", LossPlateau(0.01)),
    ],
)
def test_a_schedule_has_the_one_setting_that_the_command_line_gives_it(
    word: str | None, text: str, schedule: Schedule
) -> None:
    flags = [] if word is None else ["--schedule", word]
    assert settings_of(parsed("--method", "pfq", *flags, "--set", text)).frac.schedule == schedule


def test_numbers_without_a_point_are_numbers_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("{lr: 1e-2, gate: {beta: 1e-3}, targets: [3e0], data: pydoc, betas: [9e-1, 0.98], data_dir: 1e3}")
    settings = RunSettings.from_yaml(file)
    assert (settings.train.lr, settings.frac.gate.beta, settings.train.betas) == (0.01, 1e-3, (0.9, 0.98))
    assert settings.frac.targets == CostTargets((3.0,)) and settings.data_dir == "1e3"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"milestones": [0.3]}, "milestones=.* changes nothing for lr_schedule 'cosine'"),
        ({"lr_decay": 0.5}, "lr_decay=0.5 changes nothing for lr_schedule 'cosine'"),
        ({"betas": [0.9, 0.98]}, "betas=.* changes nothing for optimizer 'sgd'"),
        ({"block_length": 32}, "block_length=32 changes nothing for data 'digits'"),
        ({"data": "pydoc", "image_size": 32}, "image_size=32 changes nothing for data 'pydoc'"),
        ({"method": "float", "format": "mx"}, "format='mx' changes nothing for method 'float'"),
        ({"method": "float", "pins": ["last=FW-8/BW-8"]}, "pins=.*'last'.* changes nothing for method 'float'"),
        ({"method": "float", "attention": "float"}, "attention='float' changes nothing for method 'float'"),
    ],
)
def test_a_setting_that_nothing_reads_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunSettings.from_dict(values)


def test_a_setting_of_the_recipe_may_lose_its_reader() -> None:
    mobilenet = {"recipe": "table1-mobilenetv2-cifar10-sbm-8-8", "method": "float"}
    assert RunSettings.from_dict(mobilenet).frac.pins
    with pytest.raises(ConfigError, match=r"pins=.* changes nothing"):
        RunSettings.from_dict(mobilenet | {"pins": ["last=FW-8/BW-8"]})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--set", "gate.bta=1"], "a run has no such setting. Did you mean 'gate.beta'"),
        (["--set", "epsilom=1"], "Did you mean .*'schedule.epsilon'"),
        (["--set", "gate=1"], "gate is a group of settings: write one of gate.dims, gate.hidden"),
        (["--set", "gate.beta"], r"--set gate.beta has no value: write --set gate.beta=VALUE \(default: 0.001\)"),
        (["--set", "lr=1", "--lr", "2"], "lr is given twice"),
        (["--set", "gate.beta=1", "--set", "gate.beta=2"], "gate.beta is given twice"),
        (["--set", "betas=[1"], "could not be read as a value"),
    ],
)
def test_a_wrong_setting_says_what_there_is(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        given(*flags)


def test_a_file_has_the_groups_and_the_command_line_changes_single_settings(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "{method: fractrain, targets: {per_cent: [2.0, 3.0], saturate: true}, gate: {beta: 0.5, hidden: 8},"
        " schedule: {kind: auto, epsilon: 0.1, every: 9 steps}, run: {backend: plain, recordings: 3}}"
    )
    arguments = {"config": str(file), "as": None, "set": ["gate.beta=0.25", "run.backend=cpu"], "schedule": "manual"}
    frac = settings_of(arguments | {"targets": [2.5]}).frac
    assert frac.gate == GateConfig(beta=0.25, hidden=8) and frac.run == RunConfig("cpu", recordings=3, length=30)
    assert frac.schedule == Manual(every=Steps(9)) and frac.targets == CostTargets((2.5,), saturate=True)


def test_the_length_of_a_run_is_that_of_its_loop() -> None:
    frac = FracConfig(method="pfq", schedule=Manual(every=Steps(10)))
    with pytest.raises(ConfigError, match="epochs or iterations"):
        RunSettings(frac=frac.replace(**{"run.length": Steps(100)}))


def test_settings_survive_yaml(tmp_path: Path) -> None:
    frac = FracConfig(method="dfq", targets=(2.5,), pins=(Pin("depthwise", Precision(8, 16)),))
    settings = RunSettings(
        data="pydoc",
        train=TrainSettings(epochs=7, lr=0.5, lr_schedule="steps", milestones=(0.3,), betas=(0.9, 0.98)),
        frac=frac,
    )
    settings.to_yaml(tmp_path / "run.yaml")
    assert RunSettings.from_yaml(tmp_path / "run.yaml") == settings


def test_the_recipe_of_a_format_is_not_that_of_the_paper() -> None:
    values = {"method": "static", "format": "mx", "format_recipe": "mxfp4", "recipe": "table3-resnet38-cifar10-sbm"}
    settings = RunSettings.from_dict(values)
    assert (settings.recipe, settings.frac.recipe) == (values["recipe"], "mxfp4")
    assert RunSettings.from_dict(settings.to_dict()) == settings


def test_a_recipe_in_a_file_is_where_the_other_keys_start_from(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("recipe: table3-resnet38-cifar10-dfq\nepochs: 3\ngate: {beta: 0.5}\n", encoding="utf-8")
    settings, recipe = RunSettings.from_yaml(path), load_recipe("table3-resnet38-cifar10-dfq").settings
    assert (settings.model, settings.recipe, settings.frac.method) == ("zoo:resnet38", recipe.recipe, "dfq")
    assert (settings.train.epochs, settings.train.iterations) == (3, None)
    assert settings.frac.gate == replace(recipe.frac.gate, beta=0.5)
    changed = replace(recipe, model="zoo:resnet74", data="cifar100")
    assert RunSettings.from_dict(recipe.to_dict()) == recipe and RunSettings.from_dict(changed.to_dict()) == changed


def changed(settings: RunSettings) -> Iterator[RunSettings]:
    """``settings`` with one field changed, for each field that may have one of a few other values."""
    frac = settings.frac
    parts: dict[str, Any] = {"": settings, "train": settings.train, "frac": frac}
    groups = {f.name: getattr(frac, f.name) for f in fields(frac) if is_dataclass(getattr(frac, f.name))}
    for name, part in (parts | groups).items():
        kinds = get_type_hints(type(part))
        for field in fields(part):
            for other in (False, True, 2, 0.25, "text", *get_args(kinds[field.name]), None):
                with suppress(ConfigError):
                    one: Any = replace(part, **{field.name: other})
                    if name in groups:
                        one = replace(settings, frac=frac.replace(**{name: one}))
                    elif name:
                        one = replace(settings, **{name: one})
                    if one != settings:
                        yield one
                        break


@pytest.mark.parametrize("kind", ["sbm", "pfq", "dfq", "fractrain-as-the-code"])
def test_settings_that_started_from_a_recipe_survive_plain_values(kind: str) -> None:
    table = "table5-adaptation" if kind == "pfq" else "table3-resnet38-cifar10"
    found = list(changed(load_recipe(f"{table}-{kind}").settings))
    assert len(found) > 40
    for each in found:
        assert RunSettings.from_dict(each.to_dict()) == each


@pytest.mark.parametrize("flags", [["--set", "targets.saturate=false"], ["--set", "schedule=cyclic"]])
def test_a_recipe_changed_by_flags_is_what_its_file_says(flags: list[str], tmp_path: Path) -> None:
    parser = ArgumentParser()
    add_flags(parser)
    recipe = ["--recipe", "table3-resnet38-cifar10-fractrain-as-the-code"]
    settings = settings_of(parser.parse_args([*recipe, *flags]).as_dict())
    settings.to_yaml(tmp_path / "config.yaml")
    again = parser.parse_args(["--config", str(tmp_path / "config.yaml")]).as_dict()
    assert RunSettings.from_yaml(tmp_path / "config.yaml") == settings == settings_of(again)
    assert settings.frac.targets is not None and settings.frac.targets.saturate == ("cyclic" in flags[1])


def test_the_method_knows_the_length_of_the_run() -> None:
    assert RunSettings(train=TrainSettings(epochs=9)).frac.run.length == 9
    assert RunSettings.from_dict({"schedule": "manual", "epochs": 5}).frac.run.length == 5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"metod": "pfq"}, "'method'"),
        ({"recipe": "table3-resnet38-cifar10-dfg"}, "'table3-resnet38-cifar10-dfq'"),
        ({"recipe": 3}, "recipe 3 is unknown"),
        ({"shard": True, "compile": True}, "compiled graph"),
        ({"compile": True, "compile_segments": True}, "leave out one of the two"),
        ({"compile_mode": "reduce-overhead"}, "changes nothing without compile"),
        ({"compile": True, "compile_mode": "fast"}, "write one of default, reduce-overhead"),
        ({"shard": True, "mixed_precision": "fp16"}, "bf16"),
        ({"method": "fractran"}, "'fractrain'"),
        ({"epochs": 0}, "^epochs=0 must be at least 1"),
        ({"batch_size": -1}, "batch_size"),
        ({"lr": 0.0}, "lr"),
        ({"device": "tpu"}, "device"),
        ({"optimizer": "lion"}, "adamw"),
        ({"iterations": 0}, "iterations=0"),
        ({"lr_schedule": "step"}, "steps"),
        ({"milestones": [80, 120]}, "shares of the run"),
        ({"milestones": [0.5, 0.5]}, "larger"),
        ({"lr_schedule": "inverse-sqrt"}, "warm_up"),
        ({"warm_up": 1.0}, "warm_up=1.0"),
        ({"betas": [0.9]}, "betas"),
        ({"betas": ["a", "b"]}, r"must be numbers: write betas=\[0.9, 0.999\]"),
        ({"milestones": 3}, "milestones=3 must be a list"),
        ({"seed": 2**32}, r"seed=4294967296 must be at least 0 and below 4294967296"),
        ({"split_seed": 2**32}, "split_seed=4294967296"),
        ({"lr": math.inf}, "lr=inf must be above 0 and finite"),
        ({"weight_decay": math.inf}, "weight_decay=inf must be"),
        ({"gate": {"beta": math.inf}}, "gate.beta=inf must be"),
        ({3: 4}, "no setting 3"),
        ({"eps": 0.0}, "eps"),
        ({"mixed_precision": "fp8"}, "bf16"),
        ({"subset": 1}, "subset=1 leaves"),
        ({"test_subset": 0}, "test_subset=0 leaves"),
        ({"gate": {"betta": 1}}, "'beta'"),
        ({"gate_lr": "models"}, "gate_lr='models' is unknown: write one of peak, model"),
        ({"gate": {"gradient": "fisher"}, "mixed_precision": "fp16"}, "write mixed_precision='bf16'"),
        ({"gate_lr_factor": 0.0}, "gate_lr_factor=0.0"),
        ({"gate_lr": "peak", "method": "pfq"}, "changes nothing for method 'pfq'"),
        ({"gate_lr_factor": 0.5, "method": "static"}, "changes nothing for method 'static'"),
    ],
)
def test_settings_without_meaning_say_what_to_write(values: dict[Any, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunSettings.from_dict(values)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"- a\n- b\n", "has no fields"),
        (b"a: [", "could not be read as YAML"),
        (b"model: \xe4", "UTF-8"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "run.yaml"
    if content is not None:
        path.write_bytes(content)
    for read in (RunSettings.from_yaml, FracConfig.from_yaml):
        with pytest.raises(ConfigError, match=rf"run\.yaml.* {message}"):
            read(path)
