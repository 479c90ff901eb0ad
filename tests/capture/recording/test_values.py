"""Values for a log, and other outputs: numbers, lists, ``torch.Size`` and distributions, as the model gives them."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import math
import re
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn

from fractrain_fx import FracConfig, fractrainify
from fractrain_fx.capture import record
from fractrain_fx.errors import CaptureError, InputError
from tests.build import rewritten
from tests.models import thinned

FLOAT = FracConfig(method="float")
LOG = logging.getLogger(__name__)
TABLE = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
Pair = namedtuple("Pair", "y value")


class Net(nn.Module):
    """Three layers; ``after`` gets their result and the input, and gives the output."""

    def __init__(self, after: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.after = after

    def forward(self, x: Tensor) -> Any:
        return self.after(self, self.last(self.middle(self.first(x)).relu()), x)


@dataclasses.dataclass
class Output:
    y: Tensor
    loss: float = 0.0


@dataclasses.dataclass
class Log:
    loss: float


def logs_the_loss(model: Net, y: Tensor, x: Tensor) -> Any:
    loss = y.square().mean()
    return loss, {"loss": loss.item()}


def computes_with_numbers(model: Net, y: Tensor, x: Tensor) -> Any:
    loss = y.square().mean().item()
    return y, {"perplexity": math.exp(loss), "twice": 2 * loss + 1, "square": loss**2, "rounded": round(loss, 3)}


def converts_to_float(model: Net, y: Tensor, x: Tensor) -> Any:
    return y, float(y.mean()), int((y > 0).sum())


def counts_correct_ones(model: Net, y: Tensor, x: Tensor) -> Any:
    return y, (y.argmax(1) == 0).sum().item() / x.shape[0]


def gives_lists(model: Net, y: Tensor, x: Tensor) -> Any:
    return y, y.mean(0).tolist(), y.argmax(1).tolist(), [y.max().item(), {"low": [y.min().item()]}]


def gives_a_dataclass(model: Net, y: Tensor, x: Tensor) -> Any:
    return Output(y, y.mean().item()), Log(y.max().item()), Pair(y, y.min().item())


def gives_a_model_output(model: Net, y: Tensor, x: Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=y, hidden_states=(y.mean().item(),))  # type: ignore[arg-type]


def reads_before_it_writes(model: Net, y: Tensor, x: Tensor) -> Any:
    z = y.detach().clone()
    before = z.sum().item()
    return y, before, z.add_(1)


def multiplies_a_tensor(model: Net, y: Tensor, x: Tensor) -> Any:
    scale = y.detach().abs().max().item()
    return y / scale + float(y.detach().std()) * y


def fills_tensors(model: Net, y: Tensor, x: Tensor) -> Any:
    low = y.min().item()
    return y + torch.full_like(y, low), torch.tensor([low, y.max().item()]), y.clamp(-abs(low), abs(low))


def reads_a_parameter(model: Net, y: Tensor, x: Tensor) -> Any:
    return y * model.last.bias.sum().item()


def shifts_a_window(model: Net, y: Tensor, x: Tensor) -> Any:
    start = torch.randint(3, (1,)).item()
    return y + x[:, start : start + 2].sum(1, keepdim=True)


def gives_sizes(model: Net, y: Tensor, x: Tensor) -> Any:
    return y, y.size(), {"shape": x.shape[1:], "samples": y.shape[0]}


def gives_a_normal(model: Net, y: Tensor, x: Tensor) -> Any:
    return distributions.Normal(y, F.softplus(y) + 1e-3)


def gives_categoricals(model: Net, y: Tensor, x: Tensor) -> Any:
    return distributions.Categorical(logits=y), distributions.Categorical(probs=y.softmax(-1)), y.mean(1)


def gives_an_actor(model: Net, y: Tensor, x: Tensor) -> Any:
    actions = distributions.Independent(distributions.Normal(y, model.last.bias.exp()), 1)
    return {"policy": actions, "action": actions.rsample(), "value": y.mean(1)}


def gives_a_bernoulli(model: Net, y: Tensor, x: Tensor) -> Any:
    return distributions.Bernoulli(logits=y)


def gives_a_multivariate_normal(model: Net, y: Tensor, x: Tensor) -> Any:
    return distributions.MultivariateNormal(y, torch.diag_embed(y.exp()))


def gives_a_transformed_normal(model: Net, y: Tensor, x: Tensor) -> Any:
    transforms = [distributions.AffineTransform(y, 2.0), distributions.TanhTransform(cache_size=1)]
    return distributions.TransformedDistribution(distributions.Normal(y, 1.0), transforms)


def gives_a_mixture(model: Net, y: Tensor, x: Tensor) -> Any:
    return distributions.MixtureSameFamily(distributions.Categorical(logits=y), distributions.Normal(y, y.exp()))


def samples_and_scores(model: Net, y: Tensor, x: Tensor) -> Any:
    actions = distributions.Categorical(logits=y)
    chosen = actions.sample()
    return chosen, actions.log_prob(chosen), actions.entropy(), actions


def prints(model: Net, y: Tensor, x: Tensor) -> Any:
    print(f"loss {y.mean().item():.3f}")
    LOG.info("loss %.3f", y.max().item())
    return y


def leaves_a_number(model: Any, y: Tensor, x: Tensor) -> Any:
    model.loss = y.mean().item()
    return y


class Counts(nn.Module):
    """A part without parameters, which would be one node if it gave no number."""

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        return x.relu(), x.mean().item()


def has_a_part_that_counts(model: Net, y: Tensor, x: Tensor) -> Any:
    return Counts()(y)


CASES = [
    *(logs_the_loss, computes_with_numbers, converts_to_float, counts_correct_ones, gives_lists, gives_a_dataclass),
    *(gives_a_model_output, reads_before_it_writes, multiplies_a_tensor, fills_tensors, reads_a_parameter),
    *(shifts_a_window, gives_sizes, gives_a_normal, gives_categoricals, gives_an_actor, gives_a_bernoulli),
    *(gives_a_multivariate_normal, gives_a_transformed_normal, gives_a_mixture, samples_and_scores, prints),
    *(leaves_a_number, has_a_part_that_counts),
]


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The kind of each container in an output, and each value in it."""
    parts: list[tuple[Any, Any]] | None = None
    if dataclasses.is_dataclass(value) or isinstance(value, (distributions.Distribution, distributions.Transform)):
        parts = sorted((key, part) for key, part in vars(value).items() if not key.startswith("__"))
    elif isinstance(value, dict):
        parts = list(value.items())
    elif isinstance(value, (list, tuple)):
        parts = list(enumerate(value))
    yield path, value if parts is None else type(value)
    for key, part in parts or ():
        yield from leaves(part, f"{path}.{key}")


def require_equal(ours: Any, theirs: Any) -> None:
    found, wanted = list(leaves(ours)), list(leaves(theirs))
    assert [path for path, _ in found] == [path for path, _ in wanted]
    for (path, a), (_, b) in zip(found, wanted, strict=True):
        if isinstance(b, Tensor):
            assert torch.equal(a, b) and a.requires_grad == b.requires_grad, path
        else:
            assert type(a) is type(b) and (a == b or (a != a and b != b)), path


@pytest.mark.parametrize("after", thinned(CASES, 2))
def test_outputs_are_the_models(after: Callable[..., Any]) -> None:
    model = Net(after)
    plain = copy.deepcopy(model)
    rewritten = fractrainify(model, config=FLOAT, example_inputs=(torch.randn(4, 5),))
    for mode in (True, False):
        rewritten.train(mode)
        plain.train(mode)
        for step, samples in enumerate((4, 4, 6)):
            x = torch.randn(samples, 5)
            outputs = []
            for each in (rewritten, plain):
                torch.manual_seed(step)
                outputs.append(each(x))
            require_equal(*outputs)
            for module, output in zip((rewritten, plain), outputs, strict=True):
                module.zero_grad()
                flows = [part for _, part in leaves(output) if isinstance(part, Tensor) and part.requires_grad]
                torch.stack([part.cos().sum() for part in flows]).sum().backward()
            for name, p in plain.named_parameters():
                ours = rewritten.get_parameter(name).grad
                assert (p.grad is None) if ours is None else (p.grad is not None and torch.equal(ours, p.grad)), name


@pytest.mark.parametrize("after", [logs_the_loss, multiplies_a_tensor, gives_sizes, gives_an_actor])
def test_quantized_models_give_them_too(after: Callable[..., Any]) -> None:
    model = Net(after)
    wanted = [path for path, _ in leaves(model(torch.randn(4, 5)))]
    rewritten = fractrainify(model, config=FracConfig(method="pfq"), example_inputs=(torch.randn(4, 5),))
    assert [path for path, _ in leaves(rewritten(torch.randn(4, 5)))] == wanted


def indexes_a_list(model: Net, y: Tensor, x: Tensor) -> Any:
    return y * TABLE[y.argmax(1)[0].item()]  # type: ignore[index]


def gives_a_text(model: Net, y: Tensor, x: Tensor) -> Any:
    return y, f"{y.mean().item():.3f}"


def formats_by_percent(model: Net, y: Tensor, x: Tensor) -> Any:
    return y, "%.3f" % y.mean().item()  # noqa: UP031 (C code, which asks for the number without telling)


def dumps_json(model: Net, y: Tensor, x: Tensor) -> Any:
    return y, json.dumps({"loss": y.mean().item()})


def looks_up_a_name(model: Net, y: Tensor, x: Tensor) -> Any:
    names = {"0": "first", "1": "middle", "2": "last"}
    return y + getattr(model, names[str(y.argmax(1)[0].item())]).bias.sum()


def cuts(model: Net, y: Tensor, x: Tensor) -> Any:
    return y[: (y[:, 0] > -99).sum().item()]  # all rows, and one less if there were one less


def makes_a_size(model: Net, y: Tensor, x: Tensor) -> Any:
    return y.sum(0), torch.zeros((y[:, 0] > 0).sum().item() + 1)  # type: ignore[arg-type]


def repeats(model: Net, y: Tensor, x: Tensor) -> Any:
    for _ in range((y[:, 0] > -99).sum().item()):  # type: ignore[arg-type]
        y = y + 1
    return y


def branches(model: Net, y: Tensor, x: Tensor) -> Any:
    return y * 2 if y.mean().item() > 0 else y


def takes_the_larger(model: Net, y: Tensor, x: Tensor) -> Any:
    return y / max(y.detach().abs().max().item(), 1e-3)


def measures_a_text(model: Net, y: Tensor, x: Tensor) -> Any:
    return y * len(str(y.mean().item()))


def adds_up_exactly(model: Net, y: Tensor, x: Tensor) -> Any:
    return y + math.fsum((y > 0).sum(1).tolist())  # a function that is replaced, to see what it gets


def adds_up_over_calls(model: Any, y: Tensor, x: Tensor) -> Any:
    model.total = getattr(model, "total", 0.0) + y.mean().item()
    return y, model.total


@pytest.mark.parametrize(
    "after",
    [
        *(indexes_a_list, gives_a_text, formats_by_percent, dumps_json, looks_up_a_name, cuts, makes_a_size, repeats),
        *(branches, takes_the_larger, measures_a_text, adds_up_exactly, adds_up_over_calls),
    ],
)
def test_values_that_python_decides_by_are_refused_with_their_line(after: Callable[..., Any]) -> None:
    first = after.__code__.co_firstlineno
    lines = "|".join(str(line) for line in range(first + 1, first + 4))
    with pytest.raises(CaptureError, match=rf"{re.escape(Path(__file__).name)}:({lines})\b"):
        record(Net(after), (torch.randn(4, 5),))


def test_what_is_printed_is_noted_and_printed_with_the_values_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    model, x = Net(prints), torch.randn(4, 5)
    recording = record(model, (x,), check=False)
    printed = capsys.readouterr().out.split("\n")
    assert set(printed) == {"", f"loss {model.last(model.middle(model.first(x)).relu()).mean().item():.3f}"}
    (note,) = recording.python.notes
    assert f"{Path(__file__).name}:{prints.__code__.co_firstlineno + 1}" in note and "print or a log" in note


def stops(model: Net, y: Tensor, x: Tensor) -> Any:
    if not math.isfinite(y.sum().item()):
        raise ValueError("the loss is not finite")
    return y


def mends(model: Net, y: Tensor, x: Tensor) -> Any:
    if torch.isnan(y).any():
        y = torch.nan_to_num(y)
    return y


@pytest.mark.parametrize("after", [stops, mends])
def test_a_test_that_guards_against_nan_is_made_again_and_names_its_line(after: Callable[..., Any]) -> None:
    rewritten = fractrainify(Net(after), config=FLOAT, example_inputs=(torch.randn(4, 5),))
    rewritten(torch.randn(4, 5))
    line = after.__code__.co_firstlineno + 1
    with pytest.raises(InputError, match=rf"{re.escape(Path(__file__).name)}:{line}\b"):
        rewritten(torch.full((4, 5), torch.nan))


class FilledLater(nn.Module):
    """Sets an output of its class after a later one, as towers of images do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        out = BaseModelOutputWithPooling(last_hidden_state=self.first(x), hidden_states=(x + 1,))
        out["pooler_output"] = self.last(x)
        return out


def test_outputs_keep_the_order_in_which_forward_filled_them() -> None:
    model, x = FilledLater(), torch.randn(2, 4)
    out, plain = rewritten(model, x, method="float", check=True)(x), model(x)
    assert [*out] == [*plain] == ["last_hidden_state", "hidden_states", "pooler_output"]
    assert type(out) is type(plain) and torch.equal(out[2], plain[2]) and torch.equal(out.pooler_output, out[2])
