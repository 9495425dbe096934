"""Samples come from remote storage (some milliseconds each) through too few workers to keep up."""

import argparse

import torch
from planting import report, wait
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Remote(Dataset):
    def __init__(self, length, read_ms):
        self.length, self.read_ms = length, read_ms

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        wait(self.read_ms)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(512, generator=generator), index % 10


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--read-ms", type=float, default=4.0)
parser.add_argument("--workers", type=int, default=2)
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(
    Remote(16 * args.steps, args.read_ms), batch_size=16, shuffle=True, num_workers=args.workers
)
losses = []
for features, labels in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(features), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
report(losses)
