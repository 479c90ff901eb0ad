"""The lines that a run prints."""

from __future__ import annotations

import torch
from torch import nn

from fractrain_fx import Engine, FracConfig, Pin, fractrainify
from fractrain_fx.training.log.messages import announcement


def test_the_first_line_names_stages_how_they_are_chosen_and_pins() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    pins = (Pin("2", "FW-8/BW-16"), Pin("last", format="bfloat16"))
    model = fractrainify(net, config=FracConfig(method="pfq", pins=pins), example_inputs=(torch.randn(3, 4),))
    text = announcement("mine", model, "digits", Engine(model, epochs=2))
    assert text == (
        "mine: Sequential, 56 forward MACs a sample, on digits; 4 stages: FW-3/BW-6 / FW-4/BW-6 / FW-6/BW-8 / "
        "FW-8/BW-8, by equal parts, because Algorithm 1 needs 30 epochs, and the run has 2 epochs; pin 2=FW-8/BW-16; "
        "pin last=bfloat16"
    )
