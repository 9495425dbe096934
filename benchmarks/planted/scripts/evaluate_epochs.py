"""Five steps per epoch, and an evaluation of the whole validation set after every second epoch."""

import argparse

import torch
from planting import report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=40)
parser.add_argument("--evaluate-every", type=int, default=2)
args = parser.parse_args()

torch.manual_seed(0)
training = TensorDataset(torch.randn(20, 1, 32, 32), torch.randn(20, 1, 32, 32))
validation = TensorDataset(torch.randn(200, 1, 32, 32), torch.randn(200, 1, 32, 32))
model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1))
optimizer = torch.optim.Adam(model.parameters())
losses = []
for epoch in range(args.epochs):
    model.train()
    for noisy, clean in DataLoader(training, batch_size=4, shuffle=True):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(noisy), clean)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    if (epoch + 1) % args.evaluate_every == 0:
        model.eval()
        with torch.no_grad():
            for noisy, clean in DataLoader(validation, batch_size=2):
                nn.functional.mse_loss(model(noisy), clean)
report(losses)
