"""accelerate; samples are compressed arrays on disk, and decompressing them is slower than the model."""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from planting import report
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Arrays(Dataset):
    def __init__(self, paths, length):
        self.paths, self.length = paths, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        path = self.paths[index % len(self.paths)]
        image = np.load(path)["image"] if path.suffix == ".npz" else np.load(path, mmap_mode="r")
        return torch.from_numpy(image[:, ::4, ::4].copy()), index % 10


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=80)
parser.add_argument("--format", choices=["npz", "npy"], default="npz")
args = parser.parse_args()

torch.manual_seed(0)
rng = np.random.default_rng(0)
with tempfile.TemporaryDirectory() as folder:
    paths = []
    for i in range(32):
        image = np.cumsum(rng.integers(-1, 2, (3, 192, 192)), axis=2).astype(np.float32)
        paths.append(Path(folder) / f"{i}.{args.format}")
        np.savez_compressed(paths[-1], image=image) if args.format == "npz" else np.save(
            paths[-1], image
        )

    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(9216, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Arrays(paths, 16 * args.steps), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.detach())
report(losses)
