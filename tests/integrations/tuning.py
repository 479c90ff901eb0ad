"""A small BERT, its rewrite, and transformers' own Trainer, for its tests and for what ``accelerate launch`` runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import Trainer, TrainingArguments

from fractrain_fx import FracConfig, FracModel, RunConfig
from fractrain_fx.integrations.huggingface import FracTrainMixin
from tests import build
from tests.integrations.stdlib_text import LENGTH, VOCABULARY, WhichModule, batch

__all__ = ["TWO_STAGES", "Tuner", "arguments", "bert", "rewritten", "rewritten_bert"]

TWO_STAGES = build.paper(targets=(1.0, 3.0), schedule="manual", run=RunConfig(length=2))


class Tuner(FracTrainMixin, Trainer):
    pass


def bert() -> nn.Module:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    config = transformers.BertConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=LENGTH)
    return transformers.BertForSequenceClassification(config)


def rewritten(model: nn.Module, rows: Any, config: FracConfig = TWO_STAGES, labels: bool = True) -> FracModel:
    """A model of Hugging Face on a batch of rows, maybe without their labels."""
    example = batch(rows)
    if not labels:
        del example["labels"]
    return build.rewritten(model, keywords=example, config=config)


@build.made_once
def rewritten_bert(config: FracConfig = TWO_STAGES, *, labels: bool = True) -> FracModel:
    return rewritten(bert(), WhichModule(2), config, labels)


def arguments(out: Path, **changes: Any) -> TrainingArguments:
    usual: dict[str, Any] = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "logging_steps": 1,
    }
    quiet: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    return TrainingArguments(str(out), **(usual | quiet | changes))
