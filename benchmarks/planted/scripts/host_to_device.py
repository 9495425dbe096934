"""Big float64 batches are converted and copied to the device in every step."""

import argparse

import torch
from planting import report
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Volumes(Dataset):
    def __init__(self, steps, dtype):
        self.steps, self.data = (
            steps,
            torch.randn(2, 80, 3, 224, 224, dtype=torch.float64).to(dtype),
        )

    def __len__(self):
        return self.steps

    def __getitem__(self, index):
        return self.data[index % 2], torch.arange(80) % 10


class Thumbnails(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(3 * 28 * 28, 256), nn.ReLU(), nn.Linear(256, 10)
        )

    def forward(self, images):
        return self.net(images[:, :, ::8, ::8])


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument(
    "--store", choices=["float64", "float32"], default="float64", help="how the data are kept"
)
args = parser.parse_args()

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = Thumbnails().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
for images, labels in DataLoader(Volumes(args.steps, getattr(torch, args.store)), batch_size=None):
    images, labels = images.to(device, torch.float32), labels.to(device)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
report(losses)
