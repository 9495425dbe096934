"""Samples are Python lists of 20,000 numbers, as datasets without a format return them; collating makes tensors of them."""

import argparse

import numpy as np
import torch
from planting import report
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __init__(self, arrays):
        rng = np.random.default_rng(0)
        rows = [rng.standard_normal(20_000, dtype="f4") for _ in range(32)]
        self.rows = rows if arrays else [row.tolist() for row in rows]

    def __len__(self):
        return 16 * args.steps

    def __getitem__(self, i):
        return {"values": self.rows[i % len(self.rows)], "label": i % 2}


def collate(rows):
    labels = torch.tensor([row["label"] for row in rows])
    return torch.stack([torch.tensor(row["values"])[:2000] for row in rows]), labels


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--arrays", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Linear(2000, 2)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
losses = []
for values, labels in DataLoader(Rows(args.arrays), batch_size=16, collate_fn=collate):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(values), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
report(losses)
