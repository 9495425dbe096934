"""One of two ranks is 15 ms slower in every forward pass, as on a host that shares its cores with another job."""

import argparse

import torch
import torch.distributed as dist
from planting import report, wait
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Disturbed(nn.Module):
    def __init__(self, slow_ms):
        super().__init__()
        self.slow_ms = slow_ms
        self.net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))

    def forward(self, features):
        if self.slow_ms:
            wait(self.slow_ms)
        return self.net(features)


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--slow-rank", type=int, default=1, help="-1: none")
args = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(512 * args.steps, 256), torch.randint(10, (512 * args.steps,)))
model = DistributedDataParallel(Disturbed(15.0 if dist.get_rank() == args.slow_rank else 0.0))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
for features, labels in DataLoader(dataset, batch_size=256, sampler=DistributedSampler(dataset)):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(features), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
report(losses)
dist.destroy_process_group()
