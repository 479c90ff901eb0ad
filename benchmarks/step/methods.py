"""The ways to take a training step: float, the package's own methods, and each of them under autocast or compiled.

A method is written ``NAME[+MODE]...``: ``dfq``, ``float+bf16``, ``pfq+compiled``, ``static+kernels+int8``. Peers
are in :mod:`benchmarks.step.peers`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.step import peers
from benchmarks.step.peers import NotAvailableError
from fractrain_fx import Engine, FracConfig, FracModel, Precision, RunConfig, fractrainify
from fractrain_fx.config import DFQ_OPTIONS, RECIPES, Attention
from fractrain_fx.nn.gates import Controller

__all__ = ["OWN", "Method", "Step", "default_methods", "parse", "prepare", "tf32"]

FIVE_OPTIONS = tuple(Precision.parse(option) for option in ("FW-0/BW-0", "FW-3/BW-6", "FW-4/BW-6", "6/8", "6/12"))
# Recipes of the block formats, with the bits of both passes.
BLOCKS = {"mxfp8": 8, "mxfp4": 4, "nvfp4": 4, "fp8": 8}
OWN = (*("float", "static", "static-linears", "pfq", "pfq-linears"), *("dfq", "dfq5", "dfq5-linears"), *BLOCKS)
MODES = (
    *("kernels", "int8", "auto", "torchao-int8", "torchao-float8", "preserve", "checkpointed", "segments"),
    *("bf16", "tf32", "channels-last", "compiled", "graphs"),
)
# Options of FracConfig for modes of the rewritten methods. ``auto`` leaves out samples only if there are gates, and
# multiplies codes only with ``kernels``.
_OPTIONS: dict[str, dict[str, Any]] = {
    "kernels": {"run.backend": "cpu"},
    "int8": {"run.backend": "codes"},
    "auto": {"run.skipping": "left-out", "run.backend": "codes"},
    "torchao-int8": {"run.torchao": True, "format": "int", "recipe": "int8"},
    "torchao-float8": {"run.torchao": True, "format": "fp8"},
    "preserve": {"run.memory_format": "preserve"},
    "checkpointed": {},
    "segments": {},
}
KERNELS = (
    *("pfq+kernels", "pfq-linears+kernels", "dfq+kernels", "dfq5+kernels", "dfq5-linears+kernels"),
    *(f"{recipe}+kernels" for recipe in BLOCKS),
)


@dataclass(frozen=True)
class Method:
    """A method to measure: a way to train, and its modes."""

    base: str
    modes: frozenset[str] = frozenset()

    @property
    def alike(self) -> Method:
        """The float method in the same modes."""
        return Method("float", self.modes - _OPTIONS.keys())

    def __str__(self) -> str:
        return "+".join((self.base, *(mode for mode in MODES if mode in self.modes)))


@dataclass(frozen=True)
class Step:
    """A prepared training step, without the optimizer's part.

    Attributes:
        forward: from the data to the loss that ``backward`` is called on.
        parameters: all parameters, with those of gates.
        mode: the device setting for both passes.
    """

    forward: Callable[[], Tensor]
    parameters: tuple[nn.Parameter, ...]
    mode: Callable[[], contextlib.AbstractContextManager[None]]

    def run(self) -> None:
        with self.mode():
            self.forward().backward()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Set all gradients to None, as an optimizer does: with no search for parameters."""
        for parameter in self.parameters:
            parameter.grad = None


def parse(text: str) -> Method:
    """A method from its name.

    Raises:
        ValueError: a base or mode does not exist.
    """
    base, *modes = text.split("+")
    if base not in (*OWN, *peers.PEERS) or not set(modes) <= set(MODES):
        known = ", ".join((*OWN, *peers.PEERS))
        raise ValueError(f"method {text!r} is unknown: write one of {known}, then any of +{', +'.join(MODES)}")
    for mode in _OPTIONS.keys() & set(modes):
        words = ", ".join(f"{name}={word!r}" for name, word in _OPTIONS[mode].items())
        if base not in OWN[1:]:
            raise ValueError(f"method {text!r}: +{mode} is FracConfig({words}), for the rewritten ones")
        # Compiled graphs call the kernels for codes, for gates and their gradient, and to round block formats.
        kernels_only = mode == "kernels" and "int8" not in modes and not base.startswith(("dfq", *BLOCKS))
        if {"compiled", "graphs"} & set(modes) and (mode in ("auto", "preserve") or kernels_only):
            raise ValueError(f"method {text!r}: +{mode} is FracConfig({words}), which changes no compiled step")
    if len({"compiled", "graphs", "segments"} & set(modes)) > 1:
        raise ValueError(
            f"method {text!r}: +compiled and +graphs (CUDA graphs) compile the whole model, +segments its parts"
        )
    return Method(base, frozenset(modes))


def default_methods(device: str) -> list[Method]:
    """All methods that make sense on a device."""
    names = ["float", "float+bf16", *OWN[1:], *KERNELS, "float+compiled", "pfq+compiled", "dfq+compiled", *peers.PEERS]
    if device == "cuda":
        ours = ("float", "pfq", "dfq")
        names += [f"{base}{mode}{c}" for base in ours for mode in ("+tf32", "+bf16") for c in ("", "+compiled")]
    return [parse(name) for name in dict.fromkeys(names)]


def prepare(method: Method, model: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> Step:
    """A step of a copy of ``model`` on a batch.

    Raises:
        NotAvailableError: a package or a feature that the method needs is missing, or it refuses the model.
    """
    trained = copy.deepcopy(model)
    if "channels-last" in method.modes:
        if x.ndim != 4:
            raise NotAvailableError(f"{method}: channels last is an order of images")
        trained, x = trained.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    finish: Callable[[Tensor], Tensor] = _same
    if method.base in peers.PEERS:
        trained = peers.quantized(method.base, trained, x).to(x.device)
    elif method.base != "float":
        config = config_of(method.base)
        options = {name: word for mode in _OPTIONS if mode in method.modes for name, word in _OPTIONS[mode].items()}
        if "auto" in method.modes and not {"kernels", "int8"} & method.modes:
            del options["run.backend"]
        if not config.gated:
            options.pop("run.skipping", None)
        config = config.replace(**options)
        trained = fractrainify(trained, config=config, example_inputs=(x[:2],)).to(x.device)
        if "checkpointed" in method.modes:
            trained.gradient_checkpointing_enable()
        if "segments" in method.modes:
            trained.compile_segments(fullgraph=True)
        spread_choices(trained, len(x))
    trained.train()
    called: Callable[[Tensor], Tensor] = trained
    if {"compiled", "graphs"} & method.modes:
        how = "reduce-overhead" if "graphs" in method.modes else None
        called = torch.compile(trained, fullgraph=True, mode=how)
    if isinstance(trained, FracModel):
        finish = Engine(called).loss
        if method.base.startswith("pfq"):
            trained.set_precision(Precision(4, 8))  # the middle stage
    autocast = torch.autocast(x.device.type, torch.bfloat16, enabled="bf16" in method.modes)

    def forward() -> Tensor:
        if "graphs" in method.modes:
            torch.compiler.cudagraph_mark_step_begin()
        with autocast:
            task = loss(called(x), y)
        return finish(task)

    return Step(forward, tuple(trained.parameters()), lambda: tf32("tf32" in method.modes))


def config_of(base: str) -> FracConfig:
    """The configuration of one of the package's methods; stages and options are the paper's."""
    name, *kinds = base.split("-")
    attention: Attention = "float" if "linears" in kinds else "quantized"
    run = RunConfig(backend="plain")
    if name in BLOCKS:
        precision, recipe = Precision(BLOCKS[name], BLOCKS[name]), RECIPES[name]
        return FracConfig(method="static", precision=precision, format=recipe.format, recipe=recipe, run=run)
    if name == "static":
        return FracConfig(method="static", precision=Precision(8, 8), run=run, attention=attention)
    if name == "pfq":
        return FracConfig.paper("pfq", run=run, attention=attention)
    options = FIVE_OPTIONS if name == "dfq5" else DFQ_OPTIONS
    return FracConfig.paper("dfq", options=options, run=run, attention=attention)


def spread_choices(model: nn.Module, batch: int) -> None:
    """Make the samples of a batch choose every option equally often, independent of the untrained gates.

    An untrained controller gives all samples of a block one option, and such a batch may run faster than one in
    training.
    """
    for module in model.modules():
        if isinstance(module, Controller):
            options = module.head.out_features
            sample = torch.arange(batch, device=module.head.weight.device)
            second = F.one_hot(1 + sample % (options - 1), options).float()
            first = F.one_hot(sample % options, options).float()
            module.register_forward_hook(partial(_spread, first, torch.where(first[:, :1] == 1, second, first)))


def _spread(skipping: Tensor, computing: Tensor, controller: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Other choices of a controller, with the gradient of its own; where samples may not skip, none does."""
    choice, state = output
    *_, skippable = args
    return choice + ((skipping if skippable else computing) - choice).detach(), state


def _same(loss: Tensor) -> Tensor:
    return loss


@contextlib.contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Products and convolutions of a GPU in TF32, or in full float32 (cuDNN's own default is TF32)."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
