"""Fine-tune a LLaMA-type model: LoRA adapters on a frozen base of 4-bit codes, under FracTrain's stages.

By default a small model with random weights trains on Python's documentation in Hugging Face's Trainer. ``--shard``
(under torchrun) shards it in a plain loop. ``--estimate`` trains nothing: it states the memory of a 7B model.
"""

from __future__ import annotations

import argparse
import os
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch._subclasses import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from fractrain_fx import Engine, Fixed, FracConfig, FracModel, Pin, Precision, RunConfig, Steps, fractrainify
from fractrain_fx.distributed import fully_shard
from fractrain_fx.integrations.huggingface import FracTrainMixin

LENGTH, BATCH = 64, 8
DEVICE = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
SMALL = LlamaConfig(
    vocab_size=128, hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
)
SEVEN_BILLION = LlamaConfig(vocab_size=32000)  # the other defaults are LLaMA-7B's

Rows = list[dict[str, torch.Tensor]]


class FracTrainer(FracTrainMixin, Trainer):
    """Trainer, with the cost term and stages."""


def settings(steps: int) -> FracConfig:
    """Weights of 4 bits (8 in the head), activations and gradients by gate; a stage ends with each quarter."""
    return FracConfig(
        weight_bits=4,
        pins=(Pin("last", Precision(8, 8)),),
        run=RunConfig(length=Steps(steps)),
        schedule=Fixed(turns=(0.25, 0.5, 0.75), every=Steps(1)),
    )


def adapted(config: LlamaConfig, rank: int = 8) -> PeftModel:
    """The base with adapters. A real base comes from ``from_pretrained``."""
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(LlamaForCausalLM(config), lora)


def row_of(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """A row for a causal model, which is its own label."""
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def texts() -> Rows:
    """Python's documentation in pieces, with a token for each character."""
    tokens = torch.tensor([min(ord(each), 127) for each in "\n\n".join(topics[name] for name in sorted(topics))])
    return [row_of(piece) for piece in tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)]


def batch(rows: Rows, place: int, size: int = BATCH) -> dict[str, torch.Tensor]:
    """Rows that follow one another."""
    chosen = [rows[(place * size + each) % len(rows)] for each in range(size)]
    return {name: torch.stack([row[name] for row in chosen]).to(DEVICE) for name in chosen[0]}


def in_trainer(model: FracModel, rows: Rows, steps: int) -> list[float]:
    """Train in Hugging Face's Trainer; returns the task losses."""
    arguments = TrainingArguments(
        "runs/finetune_llama",
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        learning_rate=3e-3,
        activation_checkpointing=True,
        logging_steps=max(steps // 8, 1),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = FracTrainer(model, arguments, train_dataset=rows)
    trainer.train()
    return [entry["task_loss"] for entry in trainer.state.log_history if "task_loss" in entry]


def sharded(model: FracModel, rows: Rows, steps: int) -> list[float]:
    """Train in a plain loop, with codes, adapters and optimizer state shared out among processes."""
    model.gradient_checkpointing_enable()
    fully_shard(model)
    engine = Engine(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 3e-3)
    losses = []
    for step in range(steps):
        loss = model(**batch(rows, step * dist.get_world_size() + dist.get_rank())).loss
        engine.loss(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.end_step()
        losses.append(loss.item())
    engine.end_epoch()
    return losses


def estimate(config: LlamaConfig = SEVEN_BILLION, length: int = 2048) -> dict[str, int]:
    """Bytes of one text of ``length`` tokens, from a model without data: no weight is made."""
    with torch.device("meta"):
        original = adapted(config, rank=16)
    model = fractrainify(original, config=settings(1000), example_kwargs=row_of(torch.ones(1, 16).long()), check=False)
    print(model.pack_frozen())
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    ranges = sum(x.nbytes for name, x in model.named_buffers() if ".frozen." in name)
    model.train()
    kept = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cuda")
        for name in ("activations", "activations with checkpointing"):
            if "checkpointing" in name:
                model.gradient_checkpointing_enable({"preserve_rng_state": False})
            kept[name] = saved_bytes(model, row_of(torch.ones(1, length, device="cuda").long()))
    return {
        "base: codes, embeddings and norms": frozen,
        "base: ranges of codes": ranges,
        "adapters and gates": trained,
        "their gradients": trained,
        "their optimizer state (AdamW)": 2 * trained,
        **kept,
    }


def saved_bytes(model: FracModel, inputs: dict[str, torch.Tensor]) -> int:
    """Bytes that a forward pass keeps for backward, besides the tensors of the model."""
    own = {x.untyped_storage()._cdata for x in (*model.parameters(), *model.buffers())}
    kept: dict[int, Any] = {}

    def note(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage()._cdata] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        output = model(**inputs)
    del output
    return sum(each.nbytes() for key, each in kept.items() if key not in own)


def main(steps: int = 48, shard: bool = False) -> list[float]:
    torch.manual_seed(0)
    rows = texts()
    model = fractrainify(adapted(SMALL).to(DEVICE), config=settings(steps), example_kwargs=batch(rows, 0, 2))
    packed = model.pack_frozen()
    losses = (sharded if shard else in_trainer)(model, rows, steps)
    if not shard or dist.get_rank() == 0:
        print(f"{packed}\nloss {losses[0]:.3f} -> {losses[-1]:.3f}")
    if not shard:
        merged = model.restore().merge_and_unload()
        print(f"merged into a {type(merged).__name__} of {sum(p.numel() for p in merged.parameters()):,} parameters")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--shard", action="store_true", help="shard over the processes that torchrun started")
    parser.add_argument("--estimate", action="store_true", help="state the memory of LLaMA-7B and train nothing")
    arguments = parser.parse_args()
    if arguments.estimate:
        for name, count in estimate().items():
            print(f"{name:<40} {count / 2**30:8.2f} GiB")
    elif arguments.shard:
        dist.init_process_group()
        main(arguments.steps, shard=True)
        dist.destroy_process_group()
    else:
        main(arguments.steps)
