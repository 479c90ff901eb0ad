"""Seeds of rounding noise: drawn in training, moved apart on each process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fractrain_fx.nn.rounding import NoiseSeed


def test_each_step_has_another_seed_and_torchs_seed_fixes_it() -> None:
    source = NoiseSeed()
    torch.manual_seed(4)
    first, second = int(source()), int(source())
    torch.manual_seed(4)
    assert first != second and int(source()) == first


def test_processes_with_one_seed_draw_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    seeds = []
    for rank in range(4):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        torch.manual_seed(0)
        seeds.append(int(NoiseSeed()()))
    assert len(set(seeds)) == 4


def test_evaluation_draws_nothing() -> None:
    before = torch.random.get_rng_state()
    NoiseSeed().eval()()
    assert torch.equal(torch.random.get_rng_state(), before)
