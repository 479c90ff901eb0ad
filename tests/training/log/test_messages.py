"""The lines that a run prints."""

from __future__ import annotations

import torch
from torch import nn

from fractrain_fx import Engine, Pin
from fractrain_fx.training.log.messages import announcement, bits_line
from tests.build import rewritten


def test_the_first_line_names_stages_how_they_are_chosen_and_pins() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    pins = (Pin("2", "FW-8/BW-16"), Pin("last", format="bfloat16"))
    model = rewritten(net, torch.randn(3, 4), method="pfq", stages="FW(3,4,6,8)/BW(6,6,8,8)", pins=pins)
    text = announcement("mine", model, "digits", Engine(model, epochs=2))
    assert text == (
        "mine: Sequential, 56 forward MACs a sample, on digits; 4 stages: FW-3/BW-6 / FW-4/BW-6 / FW-6/BW-8 / "
        "FW-8/BW-8, by the length of the run: 2 epochs for 4 stages; pin 2=FW-8/BW-16; "
        "pin last=bfloat16"
    )


def test_of_many_pins_the_first_four_are_named() -> None:
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    pins = tuple(Pin(str(index), "FW-8/BW-16") for index in range(6))
    model = rewritten(net, torch.randn(3, 4), method="static", pins=pins)
    text = announcement("mine", model, "digits", Engine(model))
    assert text.endswith("; pin 2=FW-8/BW-16; pin 3=FW-8/BW-16; 2 more pins")


def test_a_block_that_samples_skip_is_explained_and_no_other() -> None:
    assert bits_line({"stem": 7.0, "layer1": 1.4}).endswith(
        "fewest 1.4 in layer1, most 7.0 in stem (a skipped block has 0)"
    )
    assert bits_line({"stem": 7.0, "layer1": 3.4}).endswith("fewest 3.4 in layer1, most 7.0 in stem")
