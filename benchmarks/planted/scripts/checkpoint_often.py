"""A checkpoint of model and optimizer every 2 steps, of a model so wide and a batch so small that writing takes longer than
computing, even on a disk that takes 28 MB in 15 ms."""

import argparse
import tempfile
from pathlib import Path

import torch
from planting import report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--save-every", type=int, default=2)
args = parser.parse_args()

torch.manual_seed(0)
dataset = TensorDataset(torch.randn(16 * args.steps, 512), torch.randint(10, (16 * args.steps,)))
model = nn.Sequential(
    nn.Linear(512, 1536), nn.ReLU(), nn.Linear(1536, 1024), nn.ReLU(), nn.Linear(1024, 10)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
losses = []
with tempfile.TemporaryDirectory() as folder:
    for step, (features, labels) in enumerate(
        DataLoader(dataset, batch_size=16, shuffle=True), start=1
    ):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(features), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if step % args.save_every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, Path(folder) / "last.pt")
report(losses)
