"""timm's own training pieces on scikit-learn's digits: optimizer, scheduler, Mixup with soft targets, EMA, task.

Of FracTrain are the lines that say so.
"""

from __future__ import annotations

import timm
import torch
from sklearn.datasets import load_digits
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2

from fractrain_fx import fractrainify
from fractrain_fx.integrations.timm import FracTrainTask

EPOCHS, BATCH = 4, 64


def main(images: int = 1280, epochs: int = EPOCHS) -> float:
    torch.manual_seed(0)
    data = load_digits()
    x = torch.tensor(data.images / 16, dtype=torch.float32).unsqueeze(1).repeat(1, 3, 1, 1)
    x, y = torch.nn.functional.interpolate(x, scale_factor=2), torch.tensor(data.target)

    model = timm.create_model("resnet10t", num_classes=10)
    model = fractrainify(model, example_inputs=(x[:2],))  # FracTrain
    task = FracTrainTask(model, SoftTargetCrossEntropy(), epochs=epochs, verbose=False)  # FracTrain
    task.setup_ema(decay=0.9)
    groups = model.param_groups(gates={"lr": 0.05}, decay_norms_and_biases=False)  # FracTrain
    optimizer = create_optimizer_v2(groups, opt="momentum", lr=0.05, weight_decay=1e-4)
    scheduler, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=epochs)
    mixup = Mixup(mixup_alpha=0.1, cutmix_alpha=0.0, label_smoothing=0.1, num_classes=10)

    for epoch in range(epochs):
        task.train()
        for rows in torch.randperm(images).split(BATCH):
            task(*mixup(x[rows], y[rows]))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            task.update_ema()
        scheduler.step(epoch + 1)
        task.end_epoch()  # FracTrain
        row = task.engine.ledger.rows[-1]
        accuracy = evaluate(task.get_eval_model(ema=True) or model, x[images:], y[images:])
        print(f"epoch {row.epoch}: loss {row.loss:.3f}, {row.level}, cp {row.cp:.2%}, EMA accuracy {accuracy:.1%}")
    return accuracy


def evaluate(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    with torch.no_grad():
        return float((model.eval()(x).argmax(1) == y).float().mean())


if __name__ == "__main__":
    main()
