"""Photographs are decoded anew for every sample, in the training process."""

import argparse
from importlib.resources import files

import numpy as np
import torch
from PIL import Image
from planting import report
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Photographs(Dataset):
    def __init__(self, length: int, cache: bool):
        self.length = length
        self.paths = [
            files("sklearn.datasets.images") / name for name in ("china.jpg", "flower.jpg")
        ]
        self.cached = [self.decode(i) for i in range(2)] if cache else None

    def decode(self, label):
        with self.paths[label].open("rb") as file:
            return np.asarray(Image.open(file).convert("RGB"))

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        label = index % 2
        photo = self.cached[label] if self.cached else self.decode(label)
        row, column = (index * 37) % (photo.shape[0] - 64), (index * 91) % (photo.shape[1] - 64)
        crop = photo[row : row + 64, column : column + 64]
        return torch.from_numpy(crop.copy()).permute(2, 0, 1).float() / 255, label


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=80)
parser.add_argument("--cache", action="store_true", help="decode each photograph once")
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, 2, 1),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, 2, 1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(64 * 256, 2),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
for images, labels in DataLoader(
    Photographs(8 * args.steps, args.cache), batch_size=8, shuffle=True
):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
report(losses)
