"""Half a second of collecting, then 100 updates from what was collected, as in TorchRL's DQN example.

`--collect-ms` is the time of one collection.
"""

import argparse

import torch
from planting import busy, report
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--collect-ms", type=float, default=500.0)
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 2))
optimizer = torch.optim.Adam(model.parameters())
states, targets = torch.randn(10_000, 4), torch.randn(10_000, 2)
losses = []
for step in range(args.steps):
    if step % 100 == 0:
        busy(args.collect_ms)
    chosen = torch.randint(0, 10_000, (128,))
    loss = nn.functional.mse_loss(model(states[chosen]), targets[chosen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
report(losses)
