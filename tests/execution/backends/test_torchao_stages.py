"""torchao under schedules: a turning point changes kernels within a step, and compiles once for each precision."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from transformers import GPT2Config, GPT2LMHeadModel

from fractrain_fx import Engine, FracConfig, FracModel, RunConfig, Steps
from fractrain_fx.config import Constant, Fixed, LossPlateau, Recipe
from fractrain_fx.engine import StageChange
from fractrain_fx.errors import ConfigError
from fractrain_fx.nn.rounding import unrounded_gradients
from tests.build import rewritten

pytest.importorskip("torchao")

EMULATED = "torchao MXFP8 emulated (a CPU has no units for MX blocks)"
MX = {"format": "mx", "recipe": "mxfp8", "stages": "FW(4,8,16)/BW(4,8,16)"}
INT8 = {"format": "int", "recipe": "int8", "stages": "FW(8,16)/BW(8,16)"}
FP8 = {"format": "fp8", "stages": "FW(8,16)/BW(8,16)"}


class Run:
    """Training steps of one model, with what was seen in them."""

    def __init__(self, net: nn.Module, x: Tensor, y: Tensor, *, own: Any = None, **options: Any) -> None:
        run = RunConfig(backend="plain", torchao=options.pop("torchao", False))
        config = FracConfig(method="pfq", run=run, **{"schedule": Constant(every=Steps(1)), **options})
        self.x, self.y = x, y
        self.model: FracModel = rewritten(net, x, config=config).train()
        self.engine = Engine(self.model, schedule=own)
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
        self.call: Any = self.model
        self.losses: list[float] = []
        self.changes: list[StageChange] = []
        self.kernels: list[set[str]] = []

    def steps(self, count: int) -> Run:
        for _ in range(count):
            self.kernels.append(_of_torchao(self.model))
            found = self.call(self.x)
            found = getattr(found, "logits", found)
            loss = self.engine.loss(F.cross_entropy(found.flatten(0, -2), self.y.flatten()))
            self.look(loss)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())
            if (change := self.engine.end_step()) is not None:
                self.changes.append(change)
        return self

    def look(self, loss: Tensor) -> None:
        """What a schedule of one's own does with a loss."""

    def compiled(self) -> CompileCounterWithBackend:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")
        self.call = torch.compile(self.model, fullgraph=True, backend=counter)
        return counter


def _of_torchao(model: FracModel) -> set[str]:
    """How the products of ops are computed that torchao may take."""
    return {words for found in model.backends().values() for words in found.products.values()}


def _mlp(**options: Any) -> Run:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Linear(32, 4))
    return Run(net, torch.randn(8, 20), torch.arange(8) % 4, **options)


def _gpt2(**options: Any) -> Run:
    torch.manual_seed(0)
    sizes = GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    sizes.attn_pdrop = sizes.embd_pdrop = sizes.resid_pdrop = 0.0
    ids = torch.randint(64, (4, 9))
    return Run(GPT2LMHeadModel(sizes), ids[:, :-1].contiguous(), ids[:, 1:], **options)


def _fixed(*steps: int) -> Fixed:
    return Fixed(tuple(map(Steps, steps)), every=Steps(1))


AUTO = {"schedule": LossPlateau(epsilon=0.4, every=Steps(1))}


@pytest.mark.long
def test_a_gpt2_goes_from_mxfp4_to_mxfp8_to_bf16_with_the_losses_of_its_simulation() -> None:
    simulated, real = _gpt2(**MX, **AUTO), _gpt2(**MX, **AUTO, torchao=True)
    while len(real.changes) < 2 and len(real.losses) < 60:
        real.steps(1)
    real.steps(2), simulated.steps(len(real.losses))
    assert real.losses == simulated.losses  # bit for bit, over three precisions
    assert real.changes == simulated.changes
    assert [str(each).partition(": ")[2] for each in real.changes] == [
        "stage 1 -> 2, FW-4/BW-4 -> FW-8/BW-8",
        "stage 2 -> 3, FW-8/BW-8 -> FW-16/BW-16",
    ]
    taken = [name for name, found in real.model.backends().items() if found.products]
    assert len(taken) == 4  # all but attention's products and the layers that stay float
    assert _of_torchao(real.model) == {"simulated: torch multiplies bfloat16 to float32 on GPUs only"}
    first, second = (change.step for change in real.changes)
    assert all(each == {"simulated: multiplies 4 bits by 4, and torchao 8 by 8"} for each in real.kernels[:first])
    assert all(each == {EMULATED} for each in real.kernels[first:second])


def test_a_gpt2_goes_from_fp8_to_bf16_which_is_its_simulations_from_the_same_weights() -> None:
    real, simulated = _gpt2(**FP8, **AUTO, torchao=True), _gpt2(**FP8, **AUTO)
    while not real.changes and len(real.losses) < 60:
        real.steps(1), simulated.steps(1)
    # float8 is multiplied for real: scales are divided otherwise, which moves some values to the next level.
    assert real.losses == pytest.approx(simulated.losses, rel=1e-2)
    assert real.changes == simulated.changes and len(real.changes) == 1
    assert real.kernels[0] == {"torchao float8"}
    simulated.model.load_state_dict(real.model.state_dict())
    simulated.optimizer.load_state_dict(copy.deepcopy(real.optimizer.state_dict()))
    assert real.steps(3).losses[-3:] == simulated.steps(3).losses[-3:]
    assert real.kernels[-1] == {"simulated: torch multiplies bfloat16 to float32 on GPUs only"}


@pytest.mark.long
@pytest.mark.parametrize("options", [pytest.param(MX, marks=pytest.mark.slow), FP8], ids=["mx", "fp8"])
def test_a_compiled_gpt2_is_raised_automatically_with_one_compilation_for_each_precision(
    options: dict[str, str],
) -> None:
    stages = options["stages"].count(",") // 2 + 1
    compiled, eager = (_gpt2(**options, **AUTO, torchao=True) for _ in range(2))
    counter = compiled.compiled()
    counters.clear()
    while len(compiled.changes) < stages - 1 and len(compiled.losses) < 60:
        compiled.steps(1)
    compiled.steps(2)
    assert counter.frame_count == counters["stats"]["unique_graphs"] == stages
    assert compiled.losses == eager.steps(len(compiled.losses)).losses
    assert compiled.changes == eager.changes and len(eager.changes) == stages - 1


@pytest.mark.long
@pytest.mark.parametrize("options", [pytest.param(MX, marks=pytest.mark.slow), FP8, INT8], ids=["mx", "fp8", "int8"])
def test_a_compiled_model_compiles_once_for_each_precision(options: dict[str, str]) -> None:
    stages = options["stages"].count(",") // 2 + 1
    fixed = {"schedule": _fixed(*(2 * turn for turn in range(1, stages)))}
    eager, compiled = (_mlp(**options, **fixed, torchao=True) for _ in range(2))
    counter = compiled.compiled()
    counts = []
    for _ in range(stages):
        compiled.steps(2)
        counts.append(counter.frame_count)
    assert counts == list(range(1, stages + 1))
    assert compiled.losses == eager.steps(2 * stages).losses
    compiled.model.set_precision("FW-8/BW-8")  # seen before
    compiled.call(compiled.x)
    assert counter.frame_count == stages


@pytest.mark.long
def test_stages_compile_ahead_and_leave_the_run_as_it_was() -> None:
    fixed = {"schedule": _fixed(1, 2), "torchao": True}
    eager, compiled = _mlp(**MX, **fixed), _mlp(**MX, **fixed)
    with pytest.raises(ConfigError, match=r"call model\.compile\(\) before it"):
        compiled.model.compile_stages(compiled.x)
    counter = compiled.compiled()
    state = {name: x.clone() for name, x in compiled.model.state_dict().items()}
    random = torch.get_rng_state()
    compiled.model.compile_stages(compiled.x, run=compiled.call)
    assert counter.frame_count == 3
    assert torch.equal(torch.get_rng_state(), random) and all(p.grad is None for p in compiled.model.parameters())
    assert all(torch.equal(x, state[name]) for name, x in compiled.model.state_dict().items())
    assert compiled.steps(3).losses == eager.steps(3).losses
    assert counter.frame_count == 3
    with pytest.raises(ConfigError, match=r"call model\.train\(\) before it"):
        compiled.model.eval().compile_stages(compiled.x, run=compiled.call)


@pytest.mark.long
def test_a_simulated_model_is_compiled_once_for_all_stages() -> None:
    compiled = _mlp(**MX, schedule=Constant())
    counter = compiled.compiled()
    compiled.model.compile_stages(compiled.x, run=compiled.call)
    for precision in ("4/4", "16/16"):
        compiled.model.set_precision(precision)
        compiled.call(compiled.x)
    assert counter.frame_count == 1


def test_a_stage_may_raise_the_forward_product_only() -> None:
    recipe = Recipe("mx", by_product=True)
    options = {
        "format": "mx",
        "recipe": recipe,
        "stages": "FW(8,16)/BW(8,8)",
        "schedule": _fixed(1),
    }
    simulated, real = _mlp(**options), _mlp(**options, torchao=True)
    assert real.steps(3).losses == simulated.steps(3).losses
    products = next(found.products for found in real.model.backends().values() if found.products)
    assert products["forward"] == "simulated: torch multiplies bfloat16 to float32 on GPUs only"
    assert products["input_gradient"] == products["weight_gradient"] == EMULATED


def test_int8_goes_to_bf16_and_a_saved_stage_brings_its_kernels() -> None:
    options = {**INT8, "schedule": _fixed(2)}
    simulated, real = _mlp(**options), _mlp(**options, torchao=True)
    assert real.steps(2).losses == pytest.approx(simulated.steps(2).losses, rel=1e-5)  # sums in another order
    saved = {name: x.clone() for name, x in real.model.state_dict().items()}
    assert _of_torchao(real.model) == {"simulated: torch multiplies bfloat16 to float32 on GPUs only"}
    other = _mlp(**options, torchao=True)
    assert _of_torchao(other.model) == {"torchao int8"}
    other.model.load_state_dict(saved)
    assert _of_torchao(other.model) == _of_torchao(real.model)


class _Noise:
    """The schedule of docs/how-to/own-schedule.md: goes on when rounding noise drowns the gradient."""

    def __init__(self, share: float) -> None:
        self.stage, self.ratio, self.share = 0, float("inf"), share

    def update(self, loss: float) -> int:
        self.stage = max(self.stage, int(self.ratio < self.share))
        return self.stage

    def state_dict(self) -> dict[str, Any]:
        return {"stage": self.stage}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.stage = int(state["stage"])


def test_a_schedule_of_one_s_own_measures_the_noise_of_torchaos_gradients() -> None:
    noise = _Noise(share=100.0)

    class Looking(Run):
        def look(self, loss: Tensor) -> None:
            trained = list(self.model._state.original.parameters())
            noisy = torch.autograd.grad(loss, trained, retain_graph=True)
            with unrounded_gradients():
                exact = torch.autograd.grad(loss, trained, retain_graph=True)
            apart = [a - b for a, b in zip(noisy, exact, strict=True)]
            norms = [float(torch.cat([x.flatten() for x in each]).norm()) for each in (noisy, apart)]
            noise.ratio = norms[0] / norms[1] if norms[1] else float("inf")

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))
    run = Looking(net, torch.randn(8, 20), torch.arange(8) % 4, own=noise, **FP8, torchao=True).steps(2)
    assert noise.ratio > 1 and len(run.changes) == 1 and run.kernels[0] == {"torchao float8"} != run.kernels[1]


def test_an_average_of_models_multiplies_at_the_bits_that_it_copied() -> None:
    net, x = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))), torch.randn(16, 32)
    config = FracConfig(method="pfq", stages="FW(8,4)/BW(8,8)", format="int", run=RunConfig(torchao=True))
    model = rewritten(net, x, config=config).train()
    model(x).sum().backward()
    average, first = AveragedModel(model), model.kernels()
    copied = average.module
    model.set_precision("FW-4/BW-8")
    average.update_parameters(model)
    average.eval()
    model.eval()
    assert isinstance(copied, FracModel) and copied.kernels() == model.kernels() != first
    with torch.no_grad():
        assert torch.equal(average(x), model(x))
