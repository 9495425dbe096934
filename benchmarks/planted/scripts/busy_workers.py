"""Two loader workers that augment (a loop in Python, some ms a sample) on the cores that also train."""

import argparse

import torch
from planting import busy, report
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Augmented(Dataset):
    def __init__(self, length, augment_ms):
        self.images, self.augment_ms = torch.randn(length, 3, 48, 48), augment_ms

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        busy(self.augment_ms)
        return self.images[index].flip(2), index % 10


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--augment-ms", type=float, default=2.5)
args = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(2)
dataset = Augmented(8 * args.steps, args.augment_ms)
model = nn.Sequential(
    nn.Conv2d(3, 64, 3, 1, 1),
    nn.ReLU(),
    nn.Conv2d(64, 96, 3, 1, 1),
    nn.ReLU(),
    nn.AvgPool2d(4),
    nn.Flatten(),
    nn.LazyLinear(10),
)
model(dataset.images[:1])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
for images, labels in DataLoader(dataset, batch_size=8, shuffle=True, num_workers=2):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
report(losses)
