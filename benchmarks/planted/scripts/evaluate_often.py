"""The whole validation set is gone through every 10 steps."""

import argparse

import torch
from planting import report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--evaluate-every", type=int, default=10)
args = parser.parse_args()

torch.manual_seed(0)
training = TensorDataset(
    torch.randn(16 * args.steps, 3, 32, 32), torch.randint(10, (16 * args.steps,))
)
validation = TensorDataset(torch.randn(480, 3, 32, 32), torch.randint(10, (480,)))
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, 1, 1),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, 2, 1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(64, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def evaluate():
    model.eval()
    with torch.no_grad():
        right = sum(
            (model(images).argmax(1) == labels).sum()
            for images, labels in DataLoader(validation, batch_size=32)
        )
    model.train()
    return right / len(validation)


losses = []
for step, (images, labels) in enumerate(DataLoader(training, batch_size=16, shuffle=True), start=1):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
    if step % args.evaluate_every == 0:
        print(f"step {step} accuracy {evaluate():.3f}")
report(losses)
