"""The model loops over the samples of a batch in Python: hundreds of tiny operators a step."""

import argparse

import torch
from planting import report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class PerSample(nn.Module):
    def __init__(self, vectorised):
        super().__init__()
        self.vectorised = vectorised
        self.net = nn.Sequential(
            nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
        )

    def forward(self, features):
        return (
            self.net(features)
            if self.vectorised
            else torch.stack([self.net(sample) for sample in features])
        )


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--vectorised", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
dataset = TensorDataset(torch.randn(128 * args.steps, 16), torch.randint(4, (128 * args.steps,)))
model = PerSample(args.vectorised)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
for features, labels in DataLoader(dataset, batch_size=128):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(features), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
report(losses)
