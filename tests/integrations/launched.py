"""Run by ``accelerate launch``: fine-tune, stop, resume, and write what this process has seen."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tests.integrations.stdlib_text import WhichModule
from tests.integrations.tuning import Tuner, arguments, rewritten_bert


def main(out: Path) -> None:
    torch.set_num_threads(1)
    rows = WhichModule(24)
    args = arguments(out, gradient_accumulation_steps=2, save_strategy="steps", save_steps=1)
    seen = {}
    for name, checkpoint in (("whole", None), ("resumed", f"{out}/checkpoint-1")):
        model = rewritten_bert()
        trainer = Tuner(model, args, train_dataset=rows)
        trainer.train(resume_from_checkpoint=checkpoint)
        seen[name] = {
            "ledger": trainer.engine.ledger.to_dict(),
            "weights": {key: float(value.double().sum()) for key, value in model.named_parameters()},
            "logs": [entry for entry in trainer.state.log_history if "loss" in entry],
        }
    (out / f"seen-{args.process_index}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
