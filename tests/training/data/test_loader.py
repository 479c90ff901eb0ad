"""Batches: seeded, the same from any step on and for any number of processes, augmented as pixels should be."""

from __future__ import annotations

import time

import pytest
import torch

from fractrain_fx.errors import DataError
from fractrain_fx.training.data import DataSet, draw_subset, load_dataset, make_loader
from fractrain_fx.training.data.loader import CropFlip, Share
from tests.training.data.layouts import tensors, write_cifar10


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    return load_dataset("cifar10", data_dir=write_cifar10(tmp_path_factory.mktemp("cifar")).parent).sized(3, 32)


def share(batch: int = 16, **changes: int) -> Share:
    return Share(**{"batch": batch, "seed": 0, "device": torch.device("cpu")} | changes)  # type: ignore[arg-type]


def batches(data: DataSet, first: int, count: int, **changes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(make_loader(data, share(**changes)).train(first, count))


def same(ours: list[tuple[torch.Tensor, torch.Tensor]], theirs: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in pairs)


def test_any_step_can_be_the_first(cifar: DataSet) -> None:
    whole = batches(cifar, 0, 14)  # 6 steps a pass
    torch.manual_seed(5)
    assert same(whole[9:], batches(cifar, 9, 5))


def test_the_seed_and_the_pass_decide_order_and_augmentation(cifar: DataSet) -> None:
    assert same(batches(cifar, 0, 2), batches(cifar, 0, 2))
    assert not same(batches(cifar, 0, 2), batches(cifar, 0, 2, seed=1))
    assert not same(batches(cifar, 0, 2), batches(cifar, 6, 2))


def test_a_pass_takes_each_sample_once(cifar: DataSet) -> None:
    data = draw_subset(cifar, 96, None).augmented("none")
    seen = torch.cat([inputs for inputs, _ in batches(data, 6, 6)])
    assert torch.allclose(
        seen.mean((1, 2, 3)).sort().values, data.prepare(tensors(data.train)[0]).mean((1, 2, 3)).sort().values
    )


@pytest.mark.parametrize("samples", [None, 20])  # of 20, a step of 32 takes all
def test_processes_share_the_steps_of_one(cifar: DataSet, samples: int | None) -> None:
    data = draw_subset(cifar, samples, None)
    steps = make_loader(data, share(32)).steps
    assert steps == make_loader(data, share(16, ranks=2)).steps == (3 if samples is None else 1)
    one = batches(data, 0, 2 * steps, batch=32)
    parts = [batches(data, 0, 2 * steps, batch=16, rank=rank, ranks=2) for rank in (0, 1)]
    joined = [(torch.cat([a, c]), torch.cat([b, d])) for (a, b), (c, d) in zip(*parts, strict=True)]
    assert same(one, joined)


def test_processes_share_the_test_samples(cifar: DataSet) -> None:
    data = draw_subset(cifar, None, 19)
    parts = [
        torch.cat([targets for _, targets in make_loader(data, share(4, rank=rank, ranks=3)).test()])
        for rank in range(3)
    ]
    assert sorted(torch.cat(parts).tolist()) == sorted(tensors(data.test)[1].tolist())
    alone = draw_subset(cifar, None, 2)
    assert [len(list(make_loader(alone, share(4, rank=rank, ranks=3)).test())) for rank in range(3)] == [1, 1, 0]


def test_there_must_be_a_sample_for_each_process(cifar: DataSet) -> None:
    with pytest.raises(DataError, match="too few for 3 processes"):
        make_loader(draw_subset(cifar, 2, None), share(ranks=3))


def test_test_images_are_not_augmented(cifar: DataSet) -> None:
    ((inputs, _), *_) = make_loader(cifar, share(20)).test()
    assert torch.equal(inputs, cifar.prepare(tensors(cifar.test)[0]))


def test_crops_and_flips_are_those_of_torchvision() -> None:
    import torchvision.transforms.functional as reference

    images = torch.randint(256, (7, 3, 32, 32), dtype=torch.uint8)
    drawn = CropFlip.draw(9, torch.Generator().manual_seed(0))
    rows = torch.tensor([8, 1, 3, 0, 5, 6, 2])
    result = drawn(images, rows)
    for image, row, ours in zip(images, rows.tolist(), result, strict=True):
        cropped = reference.crop(reference.pad(image, [4]), int(drawn.top[row]), int(drawn.left[row]), 32, 32)
        assert torch.equal(ours, reference.hflip(cropped) if drawn.mirrored[row] else cropped)


def test_corners_and_flips_are_drawn_uniformly() -> None:
    drawn = CropFlip.draw(81_000, torch.Generator().manual_seed(0))
    counts = torch.bincount(drawn.top * 9 + drawn.left, minlength=81)
    # Expected 1,000 with a deviation of 31: five of them for the farthest of 81 (chance 1e-5).
    assert (counts - 1000).abs().max() < 160
    assert abs(float(drawn.mirrored.float().mean()) - 0.5) < 5 * 0.5 / 81_000**0.5


def test_batches_cost_no_loop_over_samples(cifar: DataSet) -> None:
    def seconds(batch: int) -> float:
        loader = make_loader(cifar, share(batch))
        times = []
        for _ in range(5):
            started = time.process_time()
            list(loader.train(0, 1))
            times.append(time.process_time() - started)
        return min(times)

    # 96 images in one batch against as many batches of one: a loop over images would make these alike.
    assert seconds(96) < 0.5 * 96 * seconds(1)


def test_what_is_too_large_for_the_device_stays_in_memory(cifar: DataSet) -> None:
    assert same(batches(cifar, 0, 2, resident=0), batches(cifar, 0, 2))
