"""The Triton kernels: their numbers, by Triton's interpreter, and which tensors go to them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from fractrain_fx.config import RECIPES
from fractrain_fx.formats import Operand
from fractrain_fx.formats.affine import AffineFormat, measure
from fractrain_fx.formats.batch_axis import BatchAxis
from fractrain_fx.formats.microscaling import ELEMENTS
from fractrain_fx.kernels import formats
from fractrain_fx.kernels.formats import AffineByKernels, MicroscalingByKernels
from fractrain_fx.kernels.triton import calls, fit
from fractrain_fx.nn import ranges
from fractrain_fx.nn.rounding import rounded_gradient
from tests.models import thinned


@pytest.mark.long
@pytest.mark.parametrize("cases", ["not long", pytest.param("long", marks=pytest.mark.slow)])
def test_the_kernels_give_the_numbers_of_the_plain_operations(cases: str) -> None:
    pytest.importorskip("triton", minversion="3.7")  # the interpreter of older ones fails with today's numpy
    files = [str(Path(__file__).with_name(f"{name}.py")) for name in ("interpreted", "interpreted_gates")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:xdist", "-m", cases, *files],
        cwd=Path(__file__).parents[3],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_only_values_of_a_gpu_go_to_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shard(Tensor):
        pass

    x = torch.randn(2, 3)
    monkeypatch.setattr(fit, "has_triton_package", lambda: True)
    assert not fit.has_triton(x)
    with FakeTensorMode():
        assert not fit.has_triton(torch.empty(3, device="cuda"))
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    assert fit.has_triton(x) and fit.has_triton(nn.Parameter(x)) and fit.has_triton(x.half(), torch.zeros(()))
    for other in (x.as_subclass(Shard), x.double(), x[:0]):
        assert not fit.has_triton(other)
    assert not fit.has_triton(x, torch.zeros((), dtype=torch.float64))
    monkeypatch.setattr(fit, "has_triton_package", lambda: False)
    assert not fit.has_triton(x)


def test_a_format_asks_the_kernels_for_each_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def taken(name: str) -> None:
        monkeypatch.setattr(formats, name, lambda *_, **__: asked.append(name))

    def on_meta(x: Tensor, *_: Tensor) -> bool:
        return x.is_meta

    x = torch.empty(4, 6, device="meta")
    fmt = AffineByKernels()
    within = measure(x)
    monkeypatch.setattr(formats, "has_triton", on_meta)

    def measured(*_: Any) -> Any:
        asked.append("measure_by_triton")
        return within[:2]

    monkeypatch.setattr(formats, "measure_by_triton", measured)
    fmt.activation_range(x)
    fmt.weight_range(x, dim=0)
    assert asked == ["measure_by_triton"] * 2
    asked.clear()
    taken("round_by_triton")
    taken("round_rows_by_triton")
    fmt.activation(x, 4, within)
    fmt.weight(x, 4, dim=0, within=within)
    fmt.weight(x, 4, dim=0)
    # If the kernel of rows refuses, one kernel measures and another rounds.
    assert asked == ["round_by_triton"] * 2 + ["round_rows_by_triton", "measure_by_triton", "round_by_triton"]
    monkeypatch.setattr(formats, "round_by_triton", lambda g, bits, within, **how: (how["erase"], type(how["noise"])))
    seed = torch.tensor(3)
    assert rounded_gradient(fmt, x, torch.tensor(4), BatchAxis(), seed) == (True, int)
    running = ranges.RunningRange(fmt).to("meta").train()
    asked.clear()
    assert running(x)[:2] == within[:2] and asked == ["measure_by_triton"]  # which moves it as well
    monkeypatch.setattr(formats, "gains_by_triton", lambda x, g, widths, *_, **__: x.new_ones(4, len(widths)))
    assert fmt.activation_gains(x, x, (0, 3, 8), within).shape == (4, 3)
    plain = AffineFormat()
    asked.clear()
    plain.activation(x, 4, plain.activation_range(x))
    assert not asked


def test_a_block_format_asks_the_kernel_where_it_has_such_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []
    monkeypatch.setattr(formats, "has_triton", lambda x: True)
    monkeypatch.setattr(formats, "round_blocks_by_triton", lambda *_, noise: asked.append(noise))
    x, seed = torch.randn(6, 40), torch.tensor(3)
    of = Operand("weight_gradient", "g", (0,), across=(1,))
    for recipe, calls_it in (("mxfp4", True), ("nvfp4", True), ("jetfire", True)):
        fmt = MicroscalingByKernels(RECIPES[recipe], ("cuda",))
        assert fmt.operand(x, 4, of, seed=seed).shape == x.shape  # the plain operations, where the kernel gives None
        assert bool(asked) is calls_it and isinstance(asked.pop(), int)
    fmt = MicroscalingByKernels(RECIPES["four-over-six"], ("cuda",))
    fmt.operand(x, 4, Operand("forward", "x", (1,)))
    MicroscalingByKernels(RECIPES["mxfp4"], ("cpu",)).operand(x, 4, of, seed=seed)
    assert not asked


def compiled(kernel: Any, constants: dict[str, object], types: dict[str, str]) -> str:
    """The PTX code of a kernel for an H100. The interpreter takes more than the compiler does; it needs no GPU."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    kinds = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=places)
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
    found: str = made.asm["ptx"]
    return found


@pytest.mark.parametrize("kind", thinned([0, 1, 2], 3))
def test_the_kernel_of_blocks_compiles_for_a_gpu(kind: int) -> None:
    pytest.importorskip("triton", minversion="3.7")
    from fractrain_fx.kernels.triton.blocks import blocks_rounded

    grid = ELEMENTS["e2m1"].grid
    element = dict(zip("RSLT", (grid.relative, grid.smallest, grid.largest, grid.top), strict=True))
    constants: dict[str, object] = {f"{letter}{i}": value for i in range(3) for letter, value in element.items()}
    constants |= {"W0": 4, "W1": 6, "KIND": kind, "MEASURED": False, "NOISY": True, "ONE_WIDTH": False, "LONG": False}
    constants |= {"ROWS": 32, "FIRST": 32, "SECOND": 1}
    pointers = {"x": "*bf16", "out": "*bf16", "bits": "*i32", "most": "*bf16", "tensor_most": "*bf16"}
    assert "fma.rn.f32" not in compiled(blocks_rounded, constants, pointers)


AFFINE: dict[str, dict[str, object]] = {
    "rounded": {"NOISY": True, "INSIDE": False, "ERASE": True, "ONE_WIDTH": False, "ONE_RANGE": True, "LONG": False},
    "rounded_rows": {},
    "measured": {"MOVES": True, "PARTS": 1024},
    "rows": {},
    "ends": {},
    "gains": {"WIDTHS": 3 + (8 << 6), "COUNT": 2, "INSIDE": True, "SQUARED": False},
}


@pytest.mark.parametrize("name", thinned(AFFINE, 2))
def test_the_affine_kernels_compile_for_a_gpu(name: str) -> None:
    pytest.importorskip("triton", minversion="3.7")
    from fractrain_fx.kernels.triton import kernels

    types = dict.fromkeys(("x", "out", "g"), "*bf16") | {"bits": "*i64", "finished": "*i32", "seen": "*i1"}
    types |= dict.fromkeys(("lo", "hi", "start", "span", "partial", "run_lo", "run_span", "sums"), "*fp32")
    types["weight"] = "fp32"
    ptx = compiled(getattr(kernels, name), AFFINE[name] | {"BLOCK": 1024}, types)
    assert "fma.rn.f32" not in ptx
    if name == "measured":  # what the other programs have stored is seen by the last of them
        stores, count, loads = (
            ptx.index(each) for each in ("st.global.b32", "atom.global.gpu.acq_rel.add", "ld.volatile")
        )
        assert stores < ptx.rindex("bar.sync", 0, count) < count < ptx.index("bar.sync", count) < loads


@pytest.mark.parametrize("name", thinned(["embedded", "embedded_errors", "chosen", "chosen_errors"], 2))
def test_the_kernels_of_gates_compile_for_a_gpu(name: str) -> None:
    pytest.importorskip("triton", minversion="3.7")
    from fractrain_fx.kernels.triton import gates

    kernel = getattr(gates, name)
    constants: dict[str, object] = dict.fromkeys((each for each in kernel.arg_names if each.startswith("HAS_")), True)
    constants |= {"SAMPLES": 8, "WN": 16} | dict.fromkeys(("CHUNK", "WD"), 32) | {"WH": 32, "WO": 16, "WK": 8}
    numbers = dict.fromkeys(("count", "I", "H", "O", "D", "N", "K", "LOWEST"), "i32")
    types = {each: numbers.get(each, "*fp32") for each in kernel.arg_names}
    constants = {each: value for each, value in constants.items() if each in types}
    assert "st.global" in compiled(kernel, constants, types)


def test_no_argument_of_a_kernel_has_a_name_that_launches_take_for_themselves() -> None:
    """Such a kernel runs in the interpreter and compiles, and its first launch on a GPU fails."""
    pytest.importorskip("triton", minversion="3.7")
    from triton.backends.nvidia.compiler import CUDAOptions
    from triton.runtime.jit import JITFunction

    from fractrain_fx.kernels.triton import blocks, gates, kernels

    taken = {each.name for each in fields(CUDAOptions)} | set(signature(JITFunction.run).parameters)
    # Names in the function that Triton writes for a launch.
    taken |= {"options", "params", "specialization", "specialize_impl", "backend", "device", "stream"}
    launched = {
        name: each
        for module in (blocks, gates, kernels)
        for name, each in vars(module).items()
        if name in module.__all__
    }
    assert {"measured", "blocks_rounded", "chosen"} < set(launched)
    assert not {(name, arg) for name, each in launched.items() for arg in taken & set(each.arg_names)}


def test_values_with_gaps_are_copied_and_others_are_not() -> None:
    x = torch.randn(4, 6, 5, 7)
    for dense in (x, x.contiguous(memory_format=torch.channels_last), x.transpose(1, 3)):
        assert fit.stored(dense) is dense
    for gaps in (x[:, ::2], x[:1].expand(4, 6, 5, 7)):
        assert fit.stored(gaps) is not gaps
    turned = x.transpose(1, 3)
    assert fit.place(torch.zeros(7, 1, 1), turned) == (turned.stride(1), 7)
    assert fit.place(torch.zeros(()), x) == fit.place(torch.zeros(1, 1), x) == (1, 1)
    assert fit.place(torch.zeros(4, 6, 1, 1), x) is None
    assert calls._programs(1025) == 2
