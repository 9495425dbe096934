"""A small LSTM on five threads per core, set by the script itself, as in pytorch-forecasting's example of DeepAR."""

import argparse
import os

import torch
from planting import report
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=80)
parser.add_argument("--threads", type=int, default=5 * (os.cpu_count() or 1))
args = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(args.threads)
model, head = nn.LSTM(8, 32, 2, batch_first=True), nn.Linear(32, 1)
optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()])
series, targets = torch.randn(64, 60, 8), torch.randn(64, 60, 1)
losses = []
for _ in range(args.steps):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(head(model(series)[0]), targets)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
report(losses)
