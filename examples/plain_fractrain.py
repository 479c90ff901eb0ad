"""The script plain.py under FracTrain; the two differ by what it takes."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fractrain_fx import Engine, fractrainify


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.body(x)).relu()


torch.manual_seed(0)
digits = load_digits()
images, labels = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1), torch.tensor(digits.target)
loader = DataLoader(TensorDataset(images[:1000], labels[:1000]), batch_size=50, shuffle=True)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), Residual(16), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10)
)
model = fractrainify(model, example_inputs=(images[:2],))
engine = Engine(model, epochs=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(2):
    model.train()
    for x, y in loader:
        loss = engine.loss(nn.functional.cross_entropy(model(x), y))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.end_epoch()
    model.eval()
    with torch.no_grad():
        accuracy = (model(images[1000:]).argmax(1) == labels[1000:]).float().mean()
    print(f"epoch {epoch + 1}: test accuracy {accuracy:.1%}")
