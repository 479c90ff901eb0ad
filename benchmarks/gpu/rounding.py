"""Rounding on a GPU: the CPU's numbers, and those of plain operations where kernels compute them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.limits import below, distance
from benchmarks.gpu.setting import Setting
from fractrain_fx import GateConfig
from fractrain_fx.formats import ValueRange, affine, microscaling
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.formats.running import RangeBuffers
from fractrain_fx.kernels.formats import AffineByKernels
from fractrain_fx.nn.gate_kernels import BlockEmbeddingByKernels, ControllerByKernels
from fractrain_fx.nn.gates import BlockEmbedding, Controller

__all__ = ["by_chance", "by_kernels", "of_affine", "of_blocks", "of_gates"]


def of_affine(setting: Setting) -> str:
    """Share of values that go to the neighbouring level: the CPU's code may round a tie the other way."""
    x, differing, total = torch.randn(64, 4096), 0, 0
    for bits in (2, 3, 4, 6, 8):
        for dim in (None, 0):
            mine = affine.fake_quantize(x.to(setting.device), bits, dim=dim).cpu()
            error = (mine - affine.fake_quantize(x, bits, dim=dim)).abs()
            level = (x.amax() - x.amin()) / (2**bits - 1)
            below(float(error.max() / level), 1.001)
            differing, total = differing + int((error > 1e-5).sum()), total + x.numel()
    return f"{below(differing / total, 1e-3):.1e} of the values go to the next level"


def of_blocks(setting: Setting) -> str:
    x = torch.randn(64, 4096) * torch.logspace(-6, 6, 64)[:, None]
    blocks: tuple[tuple[str, Any], ...] = (("e8m0", 32), ("e4m3", 16), ("float32", None), ("float32", "row"))
    for element in microscaling.ELEMENTS:
        for scale, block in blocks:
            options: dict[str, Any] = {"scale": scale, "block": block}
            mine = microscaling.fake_quantize(x.to(setting.device), element, **options).cpu()
            if not torch.equal(mine, microscaling.fake_quantize(x, element, **options)):
                raise AssertionError(f"{element} with scales {scale} for {block} differs")
    return f"{len(microscaling.ELEMENTS)} elements, {len(blocks)} kinds of scales, bit for bit"


def by_kernels(setting: Setting) -> str:
    """Ranges and roundings bit for bit, and the gradient of gates up to the order of sums; both are plain on a CPU."""
    plain, quick = affine.AffineFormat(), AffineByKernels(kernels=("cuda",))
    farthest, count = 0.0, 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for x in _layouts(dtype, setting):
            _require_equal(_moved(quick, x), _moved(plain, x))
            for bits in (2, 3, 8, 16, 0, 32, torch.tensor([0, 4, 8, 32], device=setting.device).view(4, 1, 1, 1)):
                within = plain.activation_range(x)
                _require_equal(quick.activation_range(x)[:2], within[:2])
                for ends in (within, ValueRange(within.lo / 2, within.span / 2)):
                    _require_equal((quick.activation(x, bits, ends),), (plain.activation(x, bits, ends),))
                for dim in (None, 0, 1) if not isinstance(bits, Tensor) else ():
                    _require_equal(quick.weight_range(x, dim=dim)[:2], plain.weight_range(x, dim=dim)[:2])
                    _require_equal((quick.weight(x, bits, dim=dim),), (plain.weight(x, bits, dim=dim),))
                count += 1
            g = torch.randn_like(x)
            for squared in (False, True):
                sums = [fmt.activation_gains(x, g, (0, 3, 4, 8), within, squared) for fmt in (quick, plain)]
                farthest = max(farthest, distance(*sums))
    return f"{count} cases bit for bit, gradients of gates within {below(farthest, 1e-4):.1e}"


def _moved(fmt: affine.AffineFormat, x: Tensor) -> RangeBuffers:
    """A running range after a batch; three times the batch was there before."""
    before = [end.clone() for end in fmt.activation_range(3 * x)[:2]]
    running = RangeBuffers(before[0], before[1], torch.ones((), dtype=torch.bool, device=x.device))
    fmt.moved_range(x, running, 0.1)
    return running


def of_gates(setting: Setting) -> str:
    """Choices, and gradients up to the order of sums, of a controller's three steps and of an embedding."""
    controllers = ControllerByKernels(GateConfig(), 5), Controller(GateConfig(), 5)
    of_block = 40, 1, BatchAxis(), GateConfig().dims, GateConfig().init
    embeddings = BlockEmbeddingByKernels(*of_block), BlockEmbedding(*of_block)
    for quick, plain in (controllers, embeddings):
        quick.load_state_dict(plain.state_dict())
    x = torch.randn(3, 37, 40, device=setting.device)
    computed = []
    for controller, embedding in zip(controllers, embeddings, strict=True):
        controller.to(setting.device)
        embedding.to(setting.device)
        state, choices = None, []
        for features, skippable in zip(x, (True, False, True), strict=True):
            choice, state = controller(embedding(features), state, skippable)
            choices.append(choice)
        loss = (torch.stack(choices) * x[..., :5]).sum()
        parameters = *controller.parameters(), *embedding.parameters()
        computed.append((torch.stack(choices).argmax(2), *torch.autograd.grad(loss, parameters)))
    _require_equal(computed[0][:1], computed[1][:1])
    farthest = max(distance(*pair) for pair in zip(computed[0][1:], computed[1][1:], strict=True))
    return f"the same choices, gradients within {below(farthest, 1e-4):.1e}"


def _layouts(dtype: torch.dtype, setting: Setting) -> Iterator[Tensor]:
    x = torch.randn(4, 24, 17, 33, device=setting.device).to(dtype)
    yield x
    yield x.contiguous(memory_format=torch.channels_last)
    yield x.transpose(1, 3)
    yield x[:, ::2]


def _require_equal(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for mine, theirs in zip(actual, expected, strict=True):
        if not torch.equal(mine, theirs):
            raise AssertionError(f"{int((mine != theirs).sum())} of {mine.numel()} numbers differ")


def by_chance(setting: Setting) -> str:
    """The mean of 400,000 roundings lies within five standard errors."""
    x = torch.full((400_000,), 0.3, device=setting.device)
    rounded = affine.fake_quantize(x, 2, lo=0.0, span=3.0, stochastic=True)
    deviation = abs(float(rounded.mean()) - 0.3)
    return f"off by {below(deviation, 5 * (0.3 * 0.7 / x.numel()) ** 0.5):.1e}"
