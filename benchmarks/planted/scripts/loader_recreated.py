"""Short epochs, and the workers are started again for each: every worker opens its index anew."""

import argparse

import torch
from planting import report, wait
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def open_index(worker):
    wait(100.0)


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument(
    "--persistent", action="store_true", help="keep the workers from epoch to epoch"
)
args = parser.parse_args()

torch.manual_seed(0)
dataset = TensorDataset(torch.randn(128, 512), torch.randint(10, (128,)))
model = nn.Sequential(
    nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(
    dataset,
    batch_size=16,
    shuffle=True,
    num_workers=2,
    worker_init_fn=open_index,
    persistent_workers=args.persistent,
)
losses = []
for _ in range(args.epochs):
    for features, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(features), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
report(losses)
