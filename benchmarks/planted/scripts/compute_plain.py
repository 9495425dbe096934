"""Nothing is wrong: the data are in memory and the convolutions take the time."""

import argparse

import torch
from planting import report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=90)
args = parser.parse_args()

torch.manual_seed(0)
dataset = TensorDataset(torch.randn(512, 3, 32, 32), torch.randint(10, (512,)))
model = nn.Sequential(
    nn.Conv2d(3, 64, 3, 1, 1),
    nn.ReLU(),
    nn.Conv2d(64, 64, 3, 2, 1),
    nn.ReLU(),
    nn.Conv2d(64, 128, 3, 2, 1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(128, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
losses = []
while len(losses) < args.steps:
    for images, labels in DataLoader(dataset, batch_size=16, shuffle=True):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if len(losses) == args.steps:
            break
report(losses)
