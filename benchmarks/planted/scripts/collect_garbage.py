"""gc.collect() after every step, "to be safe about memory"."""

import argparse
import gc

import torch
from planting import report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=80)
parser.add_argument("--leave-garbage", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
dataset = TensorDataset(torch.randn(32 * args.steps, 512), torch.randint(10, (32 * args.steps,)))
model = nn.Sequential(
    nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
for features, labels in DataLoader(dataset, batch_size=32, shuffle=True):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(features), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
    if not args.leave_garbage:
        gc.collect()
report(losses)
