"""Gradient accumulation over 4 micro-batches; each waits 5 ms for its data, in the training process."""

import argparse

import torch
from planting import report, wait
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __init__(self, length, read_ms):
        self.length, self.read_ms = length, read_ms

    def __iter__(self):
        generator = torch.Generator().manual_seed(1)
        for _ in range(self.length):
            wait(self.read_ms)
            yield (
                torch.randn(8, 256, generator=generator),
                torch.randint(10, (8,), generator=generator),
            )


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=80)
parser.add_argument("--read-ms", type=float, default=5.0, help="as with a local copy: 0")
args = parser.parse_args()

torch.manual_seed(0)
accumulate = 4
model = nn.Sequential(
    nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
for i, (features, labels) in enumerate(
    DataLoader(Stream(accumulate * args.steps, args.read_ms), batch_size=None)
):
    loss = nn.functional.cross_entropy(model(features), labels) / accumulate
    loss.backward()
    losses.append(loss.detach())
    if (i + 1) % accumulate == 0:
        optimizer.step()
        optimizer.zero_grad()
report(losses)
