"""Seeds of rounding noise: drawn in training, moved apart on each process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fractrain_fx.nn.rounding import NoiseSeed


def test_each_step_has_another_seed_and_torchs_seed_fixes_it() -> None:
    source = NoiseSeed()
    torch.manual_seed(4)
    first, second = int(source()), int(source())
    torch.manual_seed(4)
    assert first != second and int(source()) == first


@pytest.fixture(params=["eager", "compiled"])
def seeds_of_ranks(request: pytest.FixtureRequest) -> dict[int, int]:
    """The seeds of some of 1001 processes, from the same draw."""
    found = {}
    for rank in (0, 1, 2, 3, 12, 13, 25, 26, 1000):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=1001)
        try:
            source = NoiseSeed()
            drawn = torch.compile(source, backend="eager", fullgraph=True) if request.param == "compiled" else source
            torch.manual_seed(0)
            found[rank] = int(drawn())
        finally:
            dist.destroy_process_group()
            torch.compiler.reset()
    return found


def test_processes_with_one_seed_draw_apart_however_many_there_are(seeds_of_ranks: dict[int, int]) -> None:
    read = {seed % 2**62 for seed in seeds_of_ranks.values()}  # kernels read 62 bits of a seed
    assert len(read) == len(seeds_of_ranks)


def test_processes_lie_evenly_apart(seeds_of_ranks: dict[int, int]) -> None:
    apart = seeds_of_ranks[1] - seeds_of_ranks[0]
    assert all((seed - seeds_of_ranks[0] - rank * apart) % 2**64 == 0 for rank, seed in seeds_of_ranks.items())


def test_evaluation_draws_nothing() -> None:
    before = torch.random.get_rng_state()
    NoiseSeed().eval()()
    assert torch.equal(torch.random.get_rng_state(), before)
