"""A costly augmentation of every sample (a loop in Python, 2 ms each), with no workers."""

import argparse

import torch
from planting import busy, report
from torch import nn
from torch.utils.data import DataLoader, Dataset


def elastic(image):
    busy(2.0)
    return image.roll((3, 5), dims=(1, 2))


def flip(image):
    return image.flip(2)


class Augmented(Dataset):
    def __init__(self, length, augment):
        self.images, self.augment = torch.randn(length, 3, 48, 48), augment

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.augment(self.images[index]), index % 10


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--augment", choices=["elastic", "flip"], default="elastic")
args = parser.parse_args()

torch.manual_seed(0)
dataset = Augmented(8 * args.steps, {"elastic": elastic, "flip": flip}[args.augment])
model = nn.Sequential(
    nn.Conv2d(3, 48, 3, 1, 1),
    nn.ReLU(),
    nn.Conv2d(48, 48, 3, 2, 1),
    nn.ReLU(),
    nn.Flatten(),
    nn.LazyLinear(10),
)
model(dataset.images[:1])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
for images, labels in DataLoader(dataset, batch_size=8, shuffle=True):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
report(losses)
