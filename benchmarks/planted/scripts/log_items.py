"""Every step reads the norm and a histogram of every gradient with .item() and .tolist(), and prints a line."""

import argparse
import sys

import torch
from planting import report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--log-every", type=int, default=1)
args = parser.parse_args()

torch.manual_seed(0)
dataset = TensorDataset(torch.randn(16 * args.steps, 256), torch.randint(10, (16 * args.steps,)))
layers = [layer for _ in range(24) for layer in (nn.Linear(256, 256), nn.ReLU())]
model = nn.Sequential(*layers, nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
for step, (features, labels) in enumerate(DataLoader(dataset, batch_size=16, shuffle=True)):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(features), labels)
    loss.backward()
    if step % args.log_every == 0:
        norms = {name: p.grad.norm().item() for name, p in model.named_parameters()}
        histograms = {name: p.grad.histc(64).tolist() for name, p in model.named_parameters()}
        largest = max(norms, key=norms.get)
        filled = sum(count > 0 for counts in histograms.values() for count in counts)
        print(
            f"step {step} loss {loss.item():.4f} largest {largest} bins {filled}",
            file=sys.stderr,
            flush=True,
        )
    optimizer.step()
    losses.append(loss.detach())
report(losses)
