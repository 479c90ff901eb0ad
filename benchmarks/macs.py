"""MACs of ten models by this package, by torch's FlopCounterMode and by fvcore, for docs/background/macs.md."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fractrain_fx import FracConfig, fractrainify
from fractrain_fx.capture.inputs.examples import example_inputs
from fractrain_fx.passes import facts, ops_of

__all__ = ["MODELS", "Row", "count", "main"]

_BEGIN, _END = "<!-- begin table -->", "<!-- end table -->"


def _timm(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name)
        return model

    return make


def _hugging_face(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        kind = getattr(transformers, name)
        model: nn.Module = kind(kind.config_class(**sizes))
        return model

    return make


class _Tagger(nn.Module):
    """A bidirectional LSTM over words, as in sequence taggers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 128)
        self.rnn = nn.LSTM(128, 256, num_layers=2, bidirectional=True, batch_first=True)
        self.hidden, self.head = nn.Linear(512, 128), nn.Linear(128, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(self.rnn(self.embed(tokens))[0]).relu())
        return logits


_WIDTHS = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 1024}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": _timm("resnet18"),
    "resnext50_32x4d": _timm("resnext50_32x4d"),
    "mobilenetv2_100": _timm("mobilenetv2_100"),
    "convnext_atto": _timm("convnext_atto"),
    "vit_tiny_patch16_224": _timm("vit_tiny_patch16_224"),
    "swin_tiny_patch4_window7_224": _timm("swin_tiny_patch4_window7_224"),
    "BERT, 4 layers of 256": _hugging_face("BertForSequenceClassification", **_WIDTHS, vocab_size=1000),
    "LLaMA, the same": _hugging_face("LlamaForCausalLM", **_WIDTHS, num_key_value_heads=2, vocab_size=1000),
    "T5-small": _hugging_face("T5ForConditionalGeneration", vocab_size=1000, decoder_start_token_id=0),
    "LSTM tagger": _Tagger,
}


@dataclass(frozen=True)
class Row:
    """MACs of one sample.

    Attributes:
        name: name of the model.
        ours, torchs, fvcores: MACs of the forward pass.
        ours_training, torchs_training: MACs of FW, EB and GC together.
    """

    name: str
    ours: int
    torchs: int
    fvcores: int
    ours_training: int
    torchs_training: int


class _Positional(nn.Module):
    """A call with tensors by position only, because only such a call can be traced."""

    def __init__(self, model: nn.Module, kwargs: dict[str, Any], args: int) -> None:
        super().__init__()
        self.model = model
        self._args = args
        self._names = [name for name, value in kwargs.items() if isinstance(value, Tensor)]
        self._flags = {name: value for name, value in kwargs.items() if name not in self._names}

    def forward(self, *values: Tensor) -> Tensor:
        named = dict(zip(self._names, values[self._args :], strict=True))
        return _tensor(self.model(*values[: self._args], **named, **self._flags))


def count(name: str, batch: int = 2) -> Row:
    """Count one model in all three ways on the same inputs, with torch's own attention."""
    torch.manual_seed(0)
    model = MODELS[name]()
    args: tuple[Tensor, ...]
    kwargs: dict[str, Any]
    if isinstance(model, _Tagger):
        args, kwargs = (torch.randint(1000, (batch, 32)),), {}
    else:
        args, kwargs = example_inputs(model, batch=batch)
    if getattr(getattr(model, "config", None), "use_cache", False):
        kwargs = {**kwargs, "use_cache": False}
    rewritten = fractrainify(model, config=FracConfig(method="float"), example_inputs=args, example_kwargs=kwargs)
    ours = training = 0.0
    for node, op in ops_of(rewritten.graph):
        # Ops that all samples share run once for the batch, so their cost is divided among the samples.
        share = 1 if facts(node).samples else 1 / batch
        ours, training = ours + share * (op.macs or 0), training + share * sum(op.training_macs)
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        model.eval()(*args, **kwargs)
    with FlopCounterMode(display=False) as both:
        _tensor(model.train()(*args, **kwargs)).sum().backward()
    torchs, torchs_training = (counter.get_total_flops() // 2 // batch for counter in (forward, both))
    return Row(
        name, round(ours), torchs, _by_fvcore(model.eval(), args, kwargs) // batch, round(training), torchs_training
    )


def _tensor(output: Any) -> Tensor:
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits


def _by_fvcore(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    from fvcore.nn import FlopCountAnalysis

    for name in ("fvcore", "fvcore.nn.jit_analysis"):
        logging.getLogger(name).setLevel(logging.ERROR)
    positional = _Positional(model, kwargs, len(args))
    analysis = FlopCountAnalysis(positional, (*args, *(x for x in kwargs.values() if isinstance(x, Tensor))))
    return int(analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).total())


def markdown(rows: Sequence[Row]) -> str:
    """The table, in millions of MACs."""
    lines = [
        "| model | ours, FW | FlopCounterMode, FW | fvcore, FW | ours, FW + EB + GC | FlopCounterMode, both passes |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        numbers = (row.ours, row.torchs, row.fvcores, row.ours_training, row.torchs_training)
        lines.append(f"| {row.name} | " + " | ".join(f"{number / 1e6:,.2f}" for number in numbers) + " |")
    tools = ", ".join(f"{name} {version(name)}" for name in ("torch", "timm", "transformers", "fvcore"))
    return "\n".join([*lines, "", f"Millions of MACs a sample; {tools}; CPU."])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.macs", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(MODELS), help="these models")
    parser.add_argument("--write", type=Path, help="also put the table between the marks of this page")
    options = parser.parse_args(argv)
    table = markdown([count(name) for name in options.only or MODELS])
    print(table)
    if options.write:
        page = options.write.read_text(encoding="utf-8")
        before, _, rest = page.partition(_BEGIN)
        _, _, after = rest.partition(_END)
        options.write.write_text(f"{before}{_BEGIN}\n\n{table}\n\n{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
