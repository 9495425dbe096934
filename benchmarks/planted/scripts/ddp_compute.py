"""Nothing is wrong: two ranks, few parameters, much convolution."""

import argparse

import torch
import torch.distributed as dist
from planting import report
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=80)
args = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = TensorDataset(
    torch.randn(32 * args.steps, 3, 24, 24), torch.randint(10, (32 * args.steps,))
)
model = DistributedDataParallel(
    nn.Sequential(
        nn.Conv2d(3, 48, 3, 1, 1),
        nn.ReLU(),
        nn.Conv2d(48, 48, 3, 1, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(48, 10),
    )
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
for images, labels in DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset)):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
report(losses)
dist.destroy_process_group()
