"""Import paths that documents and other people's scripts use lead to what they always did."""

from __future__ import annotations

import importlib

import pytest

import fractrain_fx.capture
import fractrain_fx.config
import fractrain_fx.passes

PATHS = (
    "fractrain_fx.engine.indicator.LossPlateau",
    "fractrain_fx.engine.schedules.StageSchedule",
    "fractrain_fx.errors.PassError",
    "fractrain_fx.formats.AffineFormat",
    "fractrain_fx.formats.Format",
    "fractrain_fx.formats.affine.AffineFormat",
    "fractrain_fx.formats.affine.fake_quantize",
    "fractrain_fx.formats.affine.measure",
    "fractrain_fx.formats.base.Bits",
    "fractrain_fx.formats.base.Format",
    "fractrain_fx.formats.get_format",
    "fractrain_fx.hardware.bitfusion.convolution",
    "fractrain_fx.hardware.bitfusion.training_step",
    "fractrain_fx.hardware.run_cost.run_cost",
    "fractrain_fx.integrations.huggingface.FracTrainMixin",
    "fractrain_fx.integrations.timm.FracTrainTask",
    "fractrain_fx.model.FracModel",
    "fractrain_fx.nn.cost.Cost",
    "fractrain_fx.nn.gates.Controller",
    "fractrain_fx.passes.graph.insert_module",
    "fractrain_fx.report.draw",
    "fractrain_fx.training.log.new_console",
    "fractrain_fx.training.optim.make_optimizer",
    "fractrain_fx.training.settings.TrainSettings",
    "fractrain_fx.zoo.models.resnet38",
    "fractrain_fx.zoo.models.transformer.TransformerLM",
    *(f"{each.__name__}.{name}" for each in (fractrain_fx, fractrain_fx.capture) for name in each.__all__),
    *(f"{each.__name__}.{name}" for each in (fractrain_fx.config, fractrain_fx.passes) for name in each.__all__),
)


@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_documents_use_works(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert hasattr(importlib.import_module(module), name)


def test_a_name_offered_in_two_places_is_one_thing() -> None:
    from fractrain_fx import drawing, report
    from fractrain_fx.formats import AffineFormat, affine

    assert report.draw is drawing.draw and affine.AffineFormat is AffineFormat
    assert callable(fractrain_fx.passes.facts) and callable(fractrain_fx.capture.record)


@pytest.mark.parametrize(("old", "new"), fractrain_fx.passes.RENAMED.items())
def test_an_old_name_of_a_pass_leads_to_the_new_one_with_a_warning(old: str, new: str) -> None:
    with pytest.deprecated_call(match=new):
        assert getattr(fractrain_fx.passes, old) is getattr(fractrain_fx.passes, new)
