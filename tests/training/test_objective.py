"""The measures of a data set: perplexity is the exponential of the mean cross-entropy, whatever the logits are."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fractrain_fx.training.objective import Objective

TOKENS = 65
OBJECTIVE = Objective("perplexity")


def outputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return 2 * torch.randn(8, 64, TOKENS, generator=generator), torch.randint(TOKENS, (8, 64), generator=generator)


def test_a_token_that_is_far_from_likely_leaves_perplexity_finite() -> None:
    logits, targets = outputs()
    logits[0, 0, targets[0, 0]] = -120.0  # its probability is 0 in float32
    loss, perplexity = OBJECTIVE.read(OBJECTIVE.sums(logits, targets))
    assert loss == pytest.approx(float(OBJECTIVE.loss(logits, targets)), rel=1e-6)  # sums in float32
    assert perplexity == pytest.approx(math.exp(loss), rel=1e-5)


def test_logits_of_half_precision_are_measured_in_float32() -> None:
    logits, targets = outputs()
    half = logits.bfloat16()
    assert OBJECTIVE.read(OBJECTIVE.sums(half, targets)) == OBJECTIVE.read(OBJECTIVE.sums(half.float(), targets))


def test_batches_add_up_by_their_targets() -> None:
    logits, targets = outputs()
    targets[0, :40] = -100  # left out, as torch's cross-entropy does
    parts = OBJECTIVE.sums(logits[:1], targets[:1]) + OBJECTIVE.sums(logits[1:], targets[1:])
    loss, perplexity = OBJECTIVE.read(parts)
    assert loss == pytest.approx(float(OBJECTIVE.loss(logits, targets)), rel=1e-6)
    assert perplexity == pytest.approx(math.exp(loss), rel=1e-5)


def test_accuracy_is_the_share_of_right_answers_in_per_cent() -> None:
    logits, targets = torch.eye(4), torch.tensor([0, 1, 2, 0])
    _, accuracy = Objective("accuracy").read(Objective.sums(logits, targets))
    assert accuracy == 75.0
