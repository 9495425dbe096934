"""A large dense embedding and a small batch: AdamW, one parameter at a time, updates rows that had no gradient."""

import argparse

import torch
from planting import report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=80)
parser.add_argument("--fused", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
dataset = TensorDataset(
    torch.randint(60_000, (8 * args.steps, 16)), torch.randint(4, (8 * args.steps,))
)
model = nn.Sequential(nn.EmbeddingBag(60_000, 64), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False, fused=args.fused)
losses = []
for items, labels in DataLoader(dataset, batch_size=8, shuffle=True):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(items), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
report(losses)
